# The first program of a guest. Lines before it set image, cgroup, release, out, root, target, job;
# and files, if the guest does not see this machine's own.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
ifconfig lo 127.0.0.1 up
while read module; do insmod /$module; done < /modules/order

disk() {
    for disk in /sys/block/vd*; do
        [ "$(cat $disk/serial)" != $1 ] || echo /dev/${disk##*/}
    done
}
space=$(disk space)
system=$(disk root)
mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /host

if [ $image = busybox ]; then
    # The files of the host, or those for another processor, under a layer in memory.
    mount -t tmpfs layer /layer
    mkdir /layer/up /layer/work
    mount -t overlay -o lowerdir=/host$files,upperdir=/layer/up,workdir=/layer/work root /new
    mount -t tmpfs run /new/run
    mount -t tmpfs tmp /new/tmp
    # The repository, if the layers hide it or it is not among the files.
    for folder in $root $target; do
        case $files:$folder in
        :/run/* | :/tmp/* | ?*:*)
            mkdir -p /new$folder
            mount --bind /host$folder /new$folder
            ;;
        esac
    done
    start="/bin/sh $job"
else
    mount -t ext4 $system /new
    for folder in $root $target; do
        mkdir -p /new$folder
        mount --bind /host$folder /new$folder
    done
    mkdir -p /new/usr/lib/modules/$release
    cp /modules/*.ko /new/usr/lib/modules/$release/
    chroot /new depmod $release
    units=/new/etc/systemd/system
    mkdir -p $units/multi-user.target.wants
    printf '[Unit]\nAfter=multi-user.target\n[Service]\nType=oneshot\nExecStart=/bin/sh %s\n' \
        $job > $units/lab.service
    ln -s ../lab.service $units/multi-user.target.wants/lab.service
    start=/sbin/init
fi
mkdir -p /new/var/tmp
mount -t ext4 $space /new/var/tmp
chmod 1777 /new/var/tmp
if [ $out = yes ]; then
    mkdir -p /new/out
    mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 out /new/out
fi
mount --move /dev /new/dev
mount --move /proc /new/proc
mount --move /sys /new/sys

if [ $image = busybox ]; then
    mkdir -p /new/dev/pts /new/dev/shm
    mount -t devpts devpts /new/dev/pts
    mount -t tmpfs shm /new/dev/shm
    case $cgroup in
    v1)
        mount -t tmpfs cgroup /new/sys/fs/cgroup
        mkdir /new/sys/fs/cgroup/memory /new/sys/fs/cgroup/unified
        mount -t cgroup -o memory cgroup /new/sys/fs/cgroup/memory
        mount -t cgroup2 cgroup /new/sys/fs/cgroup/unified
        ;;
    v2) mount -t cgroup2 cgroup /new/sys/fs/cgroup ;;
    esac
fi
exec switch_root /new $start

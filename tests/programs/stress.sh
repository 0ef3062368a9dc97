# Stressors that check the bytes they read back, all at the same time for six seconds. The stressors
# for fork, madvise and signals have little memory each.
set -eu
if ! stress-ng --verify --timeout 6 --vm 2 --vm-bytes 64M --mmap 1 --mmap-bytes 64M \
    --mremap 1 --mremap-bytes 32M --malloc 1 --malloc-bytes 1M --malloc-max 128 --malloc-touch \
    --fork 1 --madvise 1 --signal 1 >stress.log 2>&1; then
    cat stress.log >&2
    exit 1
fi
grep -c 'successful run' stress.log

# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_uzswap_global_optspecs
    string join \n h/help V/version
end

function __fish_uzswap_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_uzswap_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_uzswap_using_subcommand
    set -l cmd (__fish_uzswap_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c uzswap -n "__fish_uzswap_needs_command" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_needs_command" -s V -l version -d 'Print version'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "run" -d 'Run a command in limited memory; its other pages are compressed, in RAM and on disk'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "serve" -d 'Give the whole machine a compressed swap device; SIGTERM takes it away again'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "attach" -d 'Bring running programs below a memory limit, step by step. The limit ends with this command, or by detach'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "detach" -d 'End an attach and restore the former limits'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "config" -d 'Check or show the configuration of serve'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "remote" -d 'Show the clients of a store in another machine\'s memory, or remove the segments of dead clients'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "status" -d 'Show the stored pages, their place and ratio, and the rejected pages with the reasons'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "memory" -d 'Show the sections of memory that the pool lies in, and take them off or bring them back'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "top" -d 'Show the status all the time, with rates and the swapped processes. Keys change compressor and pool; q ends it'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "dashboard" -d 'Show the last hour in a browser: print the address where --metrics serves the page, or serve it until Ctrl-C'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "doctor" -d 'Say which features work on this machine, and for each of the others the missing part and its remedy'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "clean" -d 'Undo the remains of killed runs: swap, loop devices, mounts, cgroups'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "upgrade" -d 'Replace the program that serves by this one, after another version was installed. No page is lost; programs notice a pause'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "record" -d 'Write a running program\'s pages to a file for measurements, or the order in which a command touches its pages'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "trace" -d 'Sum up a trace of accesses, print or cut it, or export it for libCacheSim'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "simulate" -d 'Say how many faults a recorded program would have with other memory, or under another policy'
complete -c uzswap -n "__fish_uzswap_needs_command" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l memory -d 'Memory that the command and its children may use, together' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l policy -d 'In-process, the policy that decides which page leaves: order or clock [default: order]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l user -d 'Run the command as this user, with their groups and home [default: the caller; under sudo, root]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l size -d 'Largest size of the swap device, before compression [default: the machine\'s memory, and at least 16 times the limit]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l pool -d 'Memory for compressed pages [default: half of the free memory beyond the limit]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l compressor -d 'Compressor of new pages: lz4, zstd, lzo, deflate, wkdm, raw; some with a level as in zstd:3 [default: zstd; in-process lz4]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l backing -d 'Where the coldest pages go: a file with a size, a block device, or none [default: an unnamed file in /var/tmp]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l remote-copies -d 'Replicas of the store that must have a page before the disk may forget it [default: 0]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l remote-timeout -d 'Seconds to wait for a page that only the store has [default: 10]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l remote-password-file -d 'File with the store\'s password on its first line [default: UZSWAP_REMOTE_PASSWORD has it]' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l transport -d 'How the kernel\'s requests reach the cache. `auto` takes ublk only where there are no loop devices' -r -f -a "auto\t'Loop devices if there are any, or else ublk'
ublk\t'ublk'
fuse\t'FUSE and loop devices'"
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l threads -d 'Threads that serve the device [default: six and two for each CPU]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l metrics -d 'Serve metrics for Prometheus at ADDRESS/metrics, and a page that plots the last hour at ADDRESS/: a Unix socket\'s path, or a port of this machine, for example 127.0.0.1:9811' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l report -d 'Also write the report to a file, as JSON' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l in-process -d 'Page inside the command\'s processes, by a library that they preload; needs neither root nor swap. The pool is a part of --memory [default where no swap device can be made]'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l device -d 'Swap to a device of its own, which serves any program and needs root [default where one can be made]'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l include-pool -d 'Count the pool and the daemon as parts of --memory: the command gets the rest'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l load-control -d 'While many processes swap more than they compute, let no more of them run than there are CPUs'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l no-load-control -d 'Let all processes run at once, however much they swap'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l plain-backing -d 'Write pages to the backing as they are, neither encrypted nor authenticated: for a disk that is encrypted itself'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -l bare -d 'Plain memory behind the device and no cache, to measure the transport by itself'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -s q -l quiet -d 'Print neither the live view nor the report'
complete -c uzswap -n "__fish_uzswap_using_subcommand run" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l size -d 'Largest size of the swap device, before compression: for example 16G, or \'ram / 2\'' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l pool -d 'Memory for compressed pages [default: half of the free memory beyond the limit]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l compressor -d 'Compressor of new pages: lz4, zstd, lzo, deflate, wkdm, raw; some with a level as in zstd:3 [default: zstd; in-process lz4]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l backing -d 'Where the coldest pages go: a file with a size, a block device, or none [default: an unnamed file in /var/tmp]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l remote-copies -d 'Replicas of the store that must have a page before the disk may forget it [default: 0]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l remote-timeout -d 'Seconds to wait for a page that only the store has [default: 10]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l remote-password-file -d 'File with the store\'s password on its first line [default: UZSWAP_REMOTE_PASSWORD has it]' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l transport -d 'How the kernel\'s requests reach the cache. `auto` takes ublk only where there are no loop devices' -r -f -a "auto\t'Loop devices if there are any, or else ublk'
ublk\t'ublk'
fuse\t'FUSE and loop devices'"
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l threads -d 'Threads that serve the device [default: six and two for each CPU]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l metrics -d 'Serve metrics for Prometheus at ADDRESS/metrics, and a page that plots the last hour at ADDRESS/: a Unix socket\'s path, or a port of this machine, for example 127.0.0.1:9811' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l config -d 'File with all options that are not given here; its drop-ins are in FILE.d/*.conf [default: /etc/uzswap/uzswap.conf, if there is one]' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l plain-backing -d 'Write pages to the backing as they are, neither encrypted nor authenticated: for a disk that is encrypted itself'
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -l bare -d 'Plain memory behind the device and no cache, to measure the transport by itself'
complete -c uzswap -n "__fish_uzswap_using_subcommand serve" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l unit -d 'A unit of systemd' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l pid -d 'A process, with its descendants' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l cgroup -d 'A cgroup: its folder, or its name as in /proc/PID/cgroup' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l memory -d 'Memory that its processes may use, together' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l size -d 'Largest size of the swap device, before compression [default: the machine\'s memory, and at least 16 times the limit]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l pool -d 'Memory for compressed pages [default: half of the free memory beyond the limit]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l compressor -d 'Compressor of new pages: lz4, zstd, lzo, deflate, wkdm, raw; some with a level as in zstd:3 [default: zstd; in-process lz4]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l backing -d 'Where the coldest pages go: a file with a size, a block device, or none [default: an unnamed file in /var/tmp]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l remote-copies -d 'Replicas of the store that must have a page before the disk may forget it [default: 0]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l remote-timeout -d 'Seconds to wait for a page that only the store has [default: 10]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l remote-password-file -d 'File with the store\'s password on its first line [default: UZSWAP_REMOTE_PASSWORD has it]' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l transport -d 'How the kernel\'s requests reach the cache. `auto` takes ublk only where there are no loop devices' -r -f -a "auto\t'Loop devices if there are any, or else ublk'
ublk\t'ublk'
fuse\t'FUSE and loop devices'"
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l threads -d 'Threads that serve the device [default: six and two for each CPU]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l metrics -d 'Serve metrics for Prometheus at ADDRESS/metrics, and a page that plots the last hour at ADDRESS/: a Unix socket\'s path, or a port of this machine, for example 127.0.0.1:9811' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l plain-backing -d 'Write pages to the backing as they are, neither encrypted nor authenticated: for a disk that is encrypted itself'
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -l bare -d 'Plain memory behind the device and no cache, to measure the transport by itself'
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -s q -l quiet -d 'Print only errors'
complete -c uzswap -n "__fish_uzswap_using_subcommand attach" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand detach" -l unit -d 'A unit of systemd' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand detach" -l pid -d 'A process, with its descendants' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand detach" -l cgroup -d 'A cgroup: its folder, or its name as in /proc/PID/cgroup' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand detach" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and not __fish_seen_subcommand_from check show import help" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and not __fish_seen_subcommand_from check show import help" -f -a "check" -d 'Print the errors of the configuration by file and line; status 0 if there are none'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and not __fish_seen_subcommand_from check show import help" -f -a "show" -d 'Show each setting, with the file and line that set it'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and not __fish_seen_subcommand_from check show import help" -f -a "import" -d 'Print the configuration of zram-generator as one of uzswap'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and not __fish_seen_subcommand_from check show import help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and __fish_seen_subcommand_from check" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and __fish_seen_subcommand_from show" -l json -d 'Print JSON: name, value, file and line of each setting'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and __fish_seen_subcommand_from show" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and __fish_seen_subcommand_from import" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and __fish_seen_subcommand_from help" -f -a "check" -d 'Print the errors of the configuration by file and line; status 0 if there are none'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and __fish_seen_subcommand_from help" -f -a "show" -d 'Show each setting, with the file and line that set it'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and __fish_seen_subcommand_from help" -f -a "import" -d 'Print the configuration of zram-generator as one of uzswap'
complete -c uzswap -n "__fish_uzswap_using_subcommand config; and __fish_seen_subcommand_from help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and not __fish_seen_subcommand_from status gc help" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and not __fish_seen_subcommand_from status gc help" -f -a "status" -d 'Show each client, its segments there, and whether it lives'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and not __fish_seen_subcommand_from status gc help" -f -a "gc" -d 'Remove the segments of clients that have given no sign of life for a minute'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and not __fish_seen_subcommand_from status gc help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and __fish_seen_subcommand_from status" -l remote-password-file -d 'File with the password on its first line [default: UZSWAP_REMOTE_PASSWORD has it]' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and __fish_seen_subcommand_from status" -l json -d 'Print JSON'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and __fish_seen_subcommand_from status" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and __fish_seen_subcommand_from gc" -l remote-password-file -d 'File with the password on its first line [default: UZSWAP_REMOTE_PASSWORD has it]' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and __fish_seen_subcommand_from gc" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and __fish_seen_subcommand_from help" -f -a "status" -d 'Show each client, its segments there, and whether it lives'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and __fish_seen_subcommand_from help" -f -a "gc" -d 'Remove the segments of clients that have given no sign of life for a minute'
complete -c uzswap -n "__fish_uzswap_using_subcommand remote; and __fish_seen_subcommand_from help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c uzswap -n "__fish_uzswap_using_subcommand status" -l bring-in -d 'Bring all pages of a process of an in-process run into memory, and keep them there until this command ends. Debuggers and profilers see no other pages' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand status" -l json -d 'Print JSON: every attribute and statistic of every cache'
complete -c uzswap -n "__fish_uzswap_using_subcommand status" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and not __fish_seen_subcommand_from offline online help" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and not __fish_seen_subcommand_from offline online help" -f -a "offline" -d 'Move the pages of a section to others, or to the backing, and give its memory back'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and not __fish_seen_subcommand_from offline online help" -f -a "online" -d 'Allow a section, or a node, to have memory again'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and not __fish_seen_subcommand_from offline online help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and __fish_seen_subcommand_from offline" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and __fish_seen_subcommand_from online" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and __fish_seen_subcommand_from help" -f -a "offline" -d 'Move the pages of a section to others, or to the backing, and give its memory back'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and __fish_seen_subcommand_from help" -f -a "online" -d 'Allow a section, or a node, to have memory again'
complete -c uzswap -n "__fish_uzswap_using_subcommand memory; and __fish_seen_subcommand_from help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c uzswap -n "__fish_uzswap_using_subcommand top" -l interval -d 'Seconds between two readings' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand top" -l once -d 'Print it once, as text, with the rates of one interval'
complete -c uzswap -n "__fish_uzswap_using_subcommand top" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand dashboard" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand doctor" -l json -d 'Print JSON: each check, and its findings'
complete -c uzswap -n "__fish_uzswap_using_subcommand doctor" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand clean" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand upgrade" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand record" -l pid -d 'Record the pages of this running program, with their contents. Needs root' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand record" -l out -d 'New file for the pages' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand record" -l accesses -d 'Run a command, and write to this new file which pages it touches, without their contents' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand record" -l memory -d 'Memory for the pages of each process of the command. The less, the more touches are recorded' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand record" -l max -d 'Largest size of the trace; later accesses are counted and not written' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand record" -l compressor -d 'Compressor of which the trace has the sizes [default: lz4]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand record" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand trace" -l from -d 'The first event to print' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand trace" -l to -d 'The event before which to stop' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand trace" -l cut -d 'Write the events from N to before M to the new file of --out' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand trace" -l out -d 'New file for the events' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand trace" -l export -d 'Write the touches to a new file as libCacheSim reads them (oracleGeneral), each page an object of its compressed size' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand trace" -l print -d 'Print the events: number, time, process, page, kind, size, call site'
complete -c uzswap -n "__fish_uzswap_using_subcommand trace" -s h -l help -d 'Print help'
complete -c uzswap -n "__fish_uzswap_using_subcommand simulate" -l memory -d 'Memory for the pages and the pool together, one or several sizes' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand simulate" -l policy -d 'Policies to compare: order, clock, fifo, lru, belady [default: all]' -r
complete -c uzswap -n "__fish_uzswap_using_subcommand simulate" -l fleet -d 'Say how much memory many machines would save that run the programs of FILE and of these traces. Prints its assumptions' -r -F
complete -c uzswap -n "__fish_uzswap_using_subcommand simulate" -l fit -d 'Print the least memory with which faults take less than a tenth of the program\'s time'
complete -c uzswap -n "__fish_uzswap_using_subcommand simulate" -l plot -d 'Draw faults over memory instead of printing them [memory: sixteen steps from the recorded size to that of all pages]'
complete -c uzswap -n "__fish_uzswap_using_subcommand simulate" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "run" -d 'Run a command in limited memory; its other pages are compressed, in RAM and on disk'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "serve" -d 'Give the whole machine a compressed swap device; SIGTERM takes it away again'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "attach" -d 'Bring running programs below a memory limit, step by step. The limit ends with this command, or by detach'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "detach" -d 'End an attach and restore the former limits'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "config" -d 'Check or show the configuration of serve'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "remote" -d 'Show the clients of a store in another machine\'s memory, or remove the segments of dead clients'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "status" -d 'Show the stored pages, their place and ratio, and the rejected pages with the reasons'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "memory" -d 'Show the sections of memory that the pool lies in, and take them off or bring them back'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "top" -d 'Show the status all the time, with rates and the swapped processes. Keys change compressor and pool; q ends it'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "dashboard" -d 'Show the last hour in a browser: print the address where --metrics serves the page, or serve it until Ctrl-C'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "doctor" -d 'Say which features work on this machine, and for each of the others the missing part and its remedy'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "clean" -d 'Undo the remains of killed runs: swap, loop devices, mounts, cgroups'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "upgrade" -d 'Replace the program that serves by this one, after another version was installed. No page is lost; programs notice a pause'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "record" -d 'Write a running program\'s pages to a file for measurements, or the order in which a command touches its pages'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "trace" -d 'Sum up a trace of accesses, print or cut it, or export it for libCacheSim'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "simulate" -d 'Say how many faults a recorded program would have with other memory, or under another policy'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and not __fish_seen_subcommand_from run serve attach detach config remote status memory top dashboard doctor clean upgrade record trace simulate help" -f -a "help" -d 'Print this message or the help of the given subcommand(s)'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and __fish_seen_subcommand_from config" -f -a "check" -d 'Print the errors of the configuration by file and line; status 0 if there are none'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and __fish_seen_subcommand_from config" -f -a "show" -d 'Show each setting, with the file and line that set it'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and __fish_seen_subcommand_from config" -f -a "import" -d 'Print the configuration of zram-generator as one of uzswap'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and __fish_seen_subcommand_from remote" -f -a "status" -d 'Show each client, its segments there, and whether it lives'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and __fish_seen_subcommand_from remote" -f -a "gc" -d 'Remove the segments of clients that have given no sign of life for a minute'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and __fish_seen_subcommand_from memory" -f -a "offline" -d 'Move the pages of a section to others, or to the backing, and give its memory back'
complete -c uzswap -n "__fish_uzswap_using_subcommand help; and __fish_seen_subcommand_from memory" -f -a "online" -d 'Allow a section, or a node, to have memory again'

# CPython's own tests of types, memory, processes, threads and signals.
set -eu
mkdir -p scratch
if ! /usr/bin/python3 -m test --tempdir "$PWD/scratch" --timeout 600 \
    test_list test_dict test_bytes test_array test_set test_sort test_zlib test_struct test_posix \
    test_tempfile test_fork1 test_threadsignals test_select test_poll >tests.log 2>&1; then
    cat tests.log >&2
    exit 1
fi
grep -E '^(All [0-9]+ tests OK|Tests result)' tests.log

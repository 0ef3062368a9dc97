# Makes a database cluster of its own, and runs pgbench with a check of its sums, an index, and
# checksums of all pages. Three sessions at the same time aggregate, sort and join 400 000 rows in
# memory.
set -eu
PATH=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1):$PATH
data=$PWD/data
rm -rf "$data"
initdb -D "$data" --data-checksums --auth=trust --username=test --no-sync >initdb.log
cat >>"$data/postgresql.conf" <<END
listen_addresses = ''
unix_socket_directories = '$PWD'
shared_buffers = 16MB
work_mem = 96MB
hash_mem_multiplier = 1
maintenance_work_mem = 64MB
max_parallel_workers_per_gather = 0
fsync = off
END
export PGHOST=$PWD PGUSER=test PGDATABASE=postgres
pg_ctl -D "$data" -l server.log -w start >/dev/null
trap 'pg_ctl -D "$data" -m immediate stop >/dev/null; cat server.log >&2' EXIT
ask() { psql --no-psqlrc --quiet --tuples-only --no-align --set ON_ERROR_STOP=1 "$@"; }

pgbench --initialize --scale 2 --quiet 2>pgbench.log
pgbench --client 4 --jobs 2 --transactions 400 --no-vacuum >>pgbench.log 2>&1
# Each transaction adds one amount to an account, a teller and a branch, and records it.
ask --command "select count(*), (select sum(abalance) from pgbench_accounts) = sum(delta),
    (select sum(tbalance) from pgbench_tellers) = sum(delta),
    (select sum(bbalance) from pgbench_branches) = sum(delta) from pgbench_history"

ask --command "create table rows as select i, (i * 7919::bigint) % 400009 as a, i % 1000 as b,
    md5(i::text) as text from generate_series(1, 400000) i"
ask --command "select count(*), md5(string_agg(text, '' order by text)) from rows" >one &
one=$!
ask --command "select count(*), sum(s), md5(string_agg(m, '' order by a)) from
    (select a, sum(b) as s, max(text) as m from rows group by a) each" >two &
two=$!
ask --command "set enable_mergejoin = off; select count(*), sum(x.b), max(y.text) from rows x
    join rows y on x.a = y.i" >three &
three=$!
wait $one
wait $two
wait $three
cat one two three
ask --command "create index by_text on rows(text)"
ask --command "set enable_seqscan = off; select count(*), min(text), max(text) from rows
    where text between '3' and '8'"
trap - EXIT
pg_ctl -D "$data" -w stop >/dev/null
pg_checksums --check -D "$data" | grep '^Bad checksums'

//! A cache whose backing is a real store: each page comes back as it was, or is an error.

#![allow(clippy::unwrap_used, reason = "tests")]

mod rig;

use rig::{PAGES, Rig, damage, lease_bytes, server};
use rustix::fs::{MemfdFlags, memfd_create};
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};
use uzswap_engine::backing::{Backing, NoBacking};
use uzswap_engine::testing::skip;
use uzswap_remote::testing::{Cluster, Server, await_that, certificates, has_server};
use uzswap_remote::{Address, Admin, Connected};

#[test]
fn pages_come_back_from_a_store_beside_a_disk() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing("max=1G"), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    assert_eq!(rig.check(0..PAGES, 0), 0);
    assert!(rig.figure("remote_reads") > 0 && rig.figure("remote_read_ns_p50") > 1000);
    assert!(rig.figure("remote_lost") == 0 && rig.figure("remote_errors") == 0);
    assert_eq!(server.value_bytes(), rig.figure("remote_size") + lease_bytes(&server));
}

#[test]
fn a_socket_serves_as_well() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&format!("unix://{}", server.socket().display()), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    assert_eq!(rig.check(0..PAGES, 0), 0);
    assert!(rig.figure("remote_reads") > 0);
}

/// Values have a size that fits a size class of the store's allocator, and they expire.
#[test]
fn a_segment_is_a_value_with_a_life() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing("client=me"), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    let keys = server.keys("uz:me:*");
    assert!(keys.len() > 10, "{keys:?}");
    for key in keys.iter().filter(|key| !key.ends_with(":lease")) {
        let length: u64 = server.ask(&["STRLEN", key]).parse().unwrap();
        assert!(length <= 261_888, "{key}: {length}");
        let ttl: u64 = server.ask(&["PTTL", key]).parse().unwrap();
        assert!(ttl > 86_000_000 && ttl <= 86_400_000, "{ttl}");
        let usage: u64 = server.ask(&["MEMORY", "USAGE", key]).parse().unwrap();
        assert!(usage < 263_000, "{usage}");
    }
}

#[test]
fn a_store_that_is_killed_and_comes_back_empty_costs_time_alone() {
    let Some(mut server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing(""), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    server.kill();
    assert_eq!(rig.check(0..PAGES, 0), 0);
    rig.fill(0..PAGES / 2, 1);
    assert_eq!(rig.check(0..PAGES / 2, 1), 0);
    await_that("it is known to be gone", || rig.figure("remote_up") == 0);
    server.restart();
    await_that("it is used again", || rig.figure("remote_up") == 1);
    assert_eq!(rig.check(0..PAGES / 2, 1) + rig.check(PAGES / 2..PAGES, 0), 0);
    rig.await_copies();
    assert!(server.value_bytes() > 0, "new segments are copied again");
}

#[test]
fn a_flush_of_the_store_costs_time_alone_where_the_disk_has_all() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing(""), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    server.ask(&["FLUSHALL"]);
    assert_eq!(rig.check(0..PAGES, 0), 0);
    assert!(rig.figure("remote_lost") > 0);
}

#[test]
fn a_store_that_hangs_delays_a_page_by_little_where_the_disk_has_it() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing(""), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    server.suspend();
    let mut longest = Duration::ZERO;
    for number in 0..500 {
        let began = Instant::now();
        assert_eq!(rig.check(number..number + 1, 0), 0);
        longest = longest.max(began.elapsed());
    }
    server.resume();
    assert!(longest < Duration::from_millis(800), "{longest:?}");
    await_that("it is used again", || rig.figure("remote_up") == 1);
}

#[test]
fn a_segment_that_was_changed_is_read_from_the_disk() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing("client=me"), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    damage(&server);
    for _ in 0..3 {
        assert_eq!(rig.check(0..PAGES, 0), 0);
    }
    assert!(rig.figure("remote_lost") > 0);
}

/// Without a disk, with a replica: only the store has a copy.
#[test]
fn a_page_that_only_the_store_has_comes_back_or_is_an_error() {
    let Some(server) = server(&[]) else { return };
    let _replica = Server::replica_of(&server);
    let rig = Rig::new(&server.backing("copies=1&client=me&max=64M&timeout=2"), 0).unwrap();
    rig.fill(0..PAGES, 0);
    assert!(rig.figure("remote_size") > 4 << 20);
    assert_eq!(rig.check(0..PAGES, 0), 0);
    damage(&server);
    let errors = rig.check(0..PAGES, 0);
    assert!(errors > 100 && errors < PAGES as usize, "{errors}");
    server.ask(&["FLUSHALL"]);
    let lost = rig.check(0..PAGES, 0);
    assert!(lost > errors && lost < PAGES as usize, "pages in the pool are there: {lost}");
    // The cache still works: it takes new pages, also in place of lost ones.
    rig.fill(0..PAGES, 1);
    assert_eq!(rig.check(0..PAGES, 1), 0);
}

#[test]
fn a_store_that_hangs_is_replaced_by_its_replica_or_waited_for_until_the_timeout() {
    let Some(server) = server(&[]) else { return };
    let replica = Server::replica_of(&server);
    let rig = Rig::new(&server.backing("copies=1&max=64M&timeout=2"), 0).unwrap();
    rig.fill(0..PAGES, 0);
    server.suspend();
    assert_eq!(rig.check(0..200, 0), 0, "the replica has them");
    replica.suspend();
    let began = Instant::now();
    assert_eq!(rig.check(0..1, 0), 1);
    let waited = began.elapsed();
    assert!((2..6).contains(&waited.as_secs()), "{waited:?}");
    server.resume();
    replica.resume();
    await_that("it is used again", || rig.figure("remote_up") == 1);
    assert_eq!(rig.check(0..PAGES, 0), 0);
}

#[test]
fn pages_that_a_full_disk_has_no_room_for_go_to_the_store_alone() {
    let Some(server) = server(&[]) else { return };
    let _replica = Server::replica_of(&server);
    let rig = Rig::new(&server.backing("copies=1&max=64M"), 4 << 20).unwrap();
    for round in 0..3 {
        rig.fill(0..PAGES, round);
        assert_eq!(rig.check(0..PAGES, round), 0, "round {round}");
    }
    assert!(rig.figure("remote_size") > 4 << 20, "{}", rig.figure("remote_size"));
}

#[test]
fn a_store_without_replicas_never_has_the_only_copy() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing("copies=1&max=64M"), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(rig.figure("remote_size"), 0);
    server.ask(&["FLUSHALL"]);
    assert_eq!(rig.check(0..PAGES, 0), 0);
}

#[test]
fn bytes_at_the_store_are_those_of_its_segments_after_a_churn() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing(""), 32 << 20).unwrap();
    for round in 0..6 {
        rig.fill(0..PAGES, round);
    }
    rig.await_copies();
    assert_eq!(rig.check(0..PAGES, 5), 0);
    await_that("removed segments are gone", || {
        server.value_bytes().abs_diff(rig.figure("remote_size")) * 10 < rig.figure("remote_size")
    });
}

#[test]
fn a_full_store_leaves_segments_on_the_disk_and_says_so() {
    let full = ["--maxmemory", "8mb", "--maxmemory-policy", "noeviction"];
    let Some(server) = server(&full) else { return };
    let rig = Rig::new(&server.backing("max=8M"), 64 << 20).unwrap();
    rig.fill(0..2 * PAGES, 0);
    await_that("it is full", || rig.figure("remote_full") > 0);
    assert_eq!(rig.check(0..2 * PAGES, 0), 0);
    assert_eq!((rig.figure("remote_up"), rig.figure("writeback_stopped")), (1, 0));
}

#[test]
fn no_segment_is_written_to_a_store_that_begins_to_drop_keys() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing(""), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    server.ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    // The client checks the policy every ten seconds.
    std::thread::sleep(Duration::from_secs(14));
    let writes = rig.figure("remote_writes");
    rig.fill(0..PAGES, 1);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(rig.figure("remote_writes"), writes);
    assert_eq!(rig.check(0..PAGES, 1), 0);
}

#[test]
fn wrong_stores_are_refused_with_the_remedy() {
    let Some(server) = server(&["--maxmemory", "64mb"]) else { return };
    let error = |address: &str, local| Rig::new(address, local).err().unwrap();
    let expect = |address: &str, part: &str| {
        let error = error(address, 64 << 20);
        assert!(error.contains(part) && !error.contains('\n'), "{address}: {error}");
    };
    expect("valkey://127.0.0.1:1", "check that the server runs");
    expect("valkey://no.such.host.invalid", "check the name");
    expect(&server.backing("max=65M"), "more than its servers may take");
    expect("unix:///no/such/socket", "check that the server runs");
    let none = error(&server.backing(""), 0);
    assert!(none.contains("give one (--backing PATH:SIZE)"), "{none}");
    server.ask(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    expect(&server.backing(""), "set it to noeviction");
    server.ask(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    let rights = ["resetkeys", "~uz:me:*", "-@all", "+info", "+set", "+getrange"];
    let user = ["ACL", "SETUSER", "little", "on", ">word"];
    server.ask(&[&user[..], &rights].concat());
    let folder = tempfile::tempdir().unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "word\n").unwrap();
    let (port, file) = (server.port(), password.display());
    let little = format!("valkey://little@127.0.0.1:{port}/?client=me&password-file={file}");
    expect(&little, "permit it to the user (+pexpire)");
    std::fs::write(&password, "wrong\n").unwrap();
    expect(&little, "check the user and the password");
    server.ask(&["CONFIG", "SET", "requirepass", "word"]);
    expect(&server.backing(""), "give --remote-password-file or UZSWAP_REMOTE_PASSWORD");
    let replica = Server::start(&["--replicaof", "127.0.0.1", &port.to_string()]);
    expect(&replica.backing(""), "it is a replica of 127.0.0.1");
    let other = Server::start(&["--rename-command", "GETRANGE", ""]);
    expect(&other.backing(""), "unknown command");
    expect(&other.backing(""), "use Valkey 7.2 or Redis 6, or a newer one");
}

/// A table in memory that outlives its process, after one use with a store.
fn used_table(address: &Address) -> OwnedFd {
    let table = memfd_create("table", MemfdFlags::CLOEXEC).unwrap();
    let connected = Connected::with_table(address, table.try_clone().unwrap()).unwrap();
    drop(connected.over(Box::new(NoBacking), 0).unwrap());
    table
}

#[test]
fn a_process_that_goes_on_accepts_a_store_that_it_would_not_begin_with() {
    let Some(server) = server(&["--maxmemory", "64mb"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "word\n").unwrap();
    let file = format!("copies=2&max=32M&client=me&password-file={}", password.display());
    server.ask(&["ACL", "SETUSER", "me", "on", ">word", "~*", "+@all"]);
    let text = server.backing(&file).replacen("//", "//me@", 1);
    let address = Address::parse(&text).unwrap();
    let table = used_table(&address);
    let goes_on = |with: &dyn Fn(&str), state: &str, back: &dyn Fn()| {
        with(state);
        assert!(Connected::to(&address).is_err(), "{state}: nobody begins with it");
        let connected = Connected::with_table(&address, table.try_clone().unwrap());
        let connected = connected.unwrap_or_else(|error| panic!("{state}: {error}"));
        let tiers = connected.over(Box::new(NoBacking), 0).unwrap();
        assert_eq!(tiers.bytes(), 32 << 20, "{state}");
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| tiers.run(|| is_done.load(Relaxed)));
            back();
            let is_up = || tiers.remote().is_up;
            await_that(state, is_up);
            is_done.store(true, Relaxed);
        });
    };
    let set = |name: &str, value: &str| drop(server.ask(&["CONFIG", "SET", name, value]));
    let drops = |_: &str| set("maxmemory-policy", "allkeys-lru");
    goes_on(&drops, "drops keys", &|| set("maxmemory-policy", "noeviction"));
    goes_on(&|_| set("maxmemory", "1mb"), "full", &|| set("maxmemory", "64mb"));
    let lost = |_: &str| std::fs::remove_file(&password).unwrap();
    goes_on(&lost, "no password", &|| std::fs::write(&password, "word\n").unwrap());
    let refuses = |_: &str| _ = server.ask(&["ACL", "SETUSER", "me", "off"]);
    goes_on(&refuses, "no user", &|| _ = server.ask(&["ACL", "SETUSER", "me", "on"]));
}

#[test]
fn a_user_with_seven_commands_on_its_own_keys_is_enough() {
    let Some(server) = server(&[]) else { return };
    let commands = "+set +getrange +unlink +pexpire +wait +info +readonly";
    let folder = tempfile::tempdir().unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "word\n").unwrap();
    let (port, file) = (server.port(), password.display());
    let rigs = ["me", "you"].map(|client| {
        let keys = format!("~uz:{client}:*");
        let rights = ["ACL", "SETUSER", client, "on", ">word", "resetkeys", &keys, "-@all"];
        let all: Vec<_> = rights.into_iter().chain(commands.split(' ')).collect();
        assert_eq!(server.ask(&all), "OK");
        let place = format!("valkey://{client}@127.0.0.1:{port}");
        Rig::new(&format!("{place}/?client={client}&password-file={file}"), 64 << 20).unwrap()
    });
    for (rig, round) in rigs.iter().zip(0..) {
        rig.fill(0..PAGES, round);
        rig.await_copies();
    }
    for (rig, round) in rigs.iter().zip(0..) {
        assert_eq!(rig.check(0..PAGES, round), 0);
        assert!(rig.figure("remote_reads") > 0);
        assert_eq!(rig.figure("remote_errors"), 0);
    }
    for (key, is_own) in [(&server.keys("uz:me:*")[0], true), (&server.keys("uz:you:*")[0], false)]
    {
        for command in [&["GETRANGE", key, "0", "9"][..], &["SET", key, "x"], &["UNLINK", key]] {
            let said = server.ask(&[&["ACL", "DRYRUN", "me"], command].concat());
            assert_eq!(said == "OK", is_own, "{command:?}: {said}");
        }
    }
}

#[test]
fn segments_live_on_as_long_as_their_cache() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing("ttl=2&client=me"), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    let count = server.keys("uz:me:*").len();
    std::thread::sleep(Duration::from_secs(4));
    assert_eq!(server.keys("uz:me:*").len(), count, "they were renewed");
    drop(rig);
    await_that("nobody renews them", || server.keys("uz:me:*").len() <= 1);
}

#[test]
fn a_client_that_was_cut_off_for_longer_than_its_life_has_lost_its_pages() {
    let Some(server) = server(&[]) else { return };
    let replica = Server::replica_of(&server);
    let rig = Rig::new(&server.backing("ttl=5&copies=1&max=64M&timeout=1"), 0).unwrap();
    rig.fill(0..PAGES, 0);
    assert_eq!(rig.check(0..PAGES, 0), 0);
    server.suspend();
    replica.suspend();
    // The `ttl` above is not shorter, because on a busy machine a client may not reach its store
    // for seconds.
    std::thread::sleep(Duration::from_secs(9));
    server.resume();
    replica.resume();
    await_that("it is used again", || rig.figure("remote_up") == 1);
    let lost = rig.check(0..PAGES, 0);
    assert!(lost > 1000 && lost < PAGES as usize, "pages in the pool are there: {lost}");
    rig.fill(0..PAGES, 1);
    assert_eq!(rig.check(0..PAGES, 1), 0);
}

#[test]
fn a_cache_that_ends_in_order_leaves_nothing() {
    let Some(server) = server(&[]) else { return };
    let rig = Rig::new(&server.backing("client=me"), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    assert!(server.keys("uz:me:*").len() > 10);
    let tiers = rig.tiers();
    drop(rig);
    tiers.clear();
    assert_eq!(server.keys("uz:*"), [""; 0]);
}

#[test]
fn clients_are_seen_and_the_segments_of_dead_ones_removed() {
    let Some(server) = server(&[]) else { return };
    server.ask(&["SET", "user:7", "kept"]);
    let address = Address::parse(&server.backing("client=me")).unwrap();
    let rigs = [0, 1].map(|_| Rig::new(&server.backing("client=me"), 64 << 20).unwrap());
    rigs.iter().for_each(|rig| rig.fill(0..PAGES, 0));
    rigs.iter().for_each(Rig::await_copies);
    let admin = Admin::connect(&address).unwrap();
    let clients = admin.clients().unwrap();
    assert!(clients.iter().all(|one| one.client == "me" && one.owner.is_some()), "{clients:?}");
    let sizes: Vec<u64> = rigs.iter().map(|rig| rig.figure("remote_size")).collect();
    assert_eq!(clients.iter().map(|one| one.bytes).sum::<u64>(), sizes.iter().sum::<u64>());
    assert_eq!(admin.remove_dead().unwrap(), (0, 0));
    let [dead, alive] = rigs;
    drop(dead);
    let leases = server.keys("uz:me:*:lease");
    leases.iter().for_each(|lease| _ = server.ask(&["UNLINK", lease]));
    // The living cache renews its lease within 20 s.
    await_that("one lives", || server.keys("uz:me:*:lease").len() == 1);
    let (_, bytes) = admin.remove_dead().unwrap();
    assert_eq!(bytes, sizes[0]);
    assert_eq!(alive.check(0..PAGES, 0), 0);
    assert_eq!(
        (admin.clients().unwrap().len(), server.ask(&["GET", "user:7"])),
        (1, "kept".into())
    );
}

#[test]
fn a_cluster_that_loses_a_server_goes_on_with_its_replica() {
    if !has_server() {
        return skip("no server: ./setup tests installs it");
    }
    let mut cluster = Cluster::start(1000);
    let rig = Rig::new(&cluster.backing("copies=1&max=64M&timeout=30"), 4 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    assert!(rig.figure("remote_size") > 4 << 20);
    assert_eq!(rig.check(0..PAGES, 0), 0);
    let killed = cluster.primaries()[0];
    cluster.servers[killed].kill();
    assert_eq!(rig.check(0..PAGES, 0), 0, "each page has a replica");
    await_that("a replica is promoted", || cluster.primaries().len() == 3);
    await_that("it is used", || rig.figure("remote_up") == 1);
    assert_eq!(rig.check(0..PAGES, 0), 0);
}

/// A process of the test below: this program, with an address.
#[test]
fn one_of_sixteen() {
    let Ok(address) = std::env::var("UZSWAP_TEST_STORE") else { return };
    let rig = Rig::new(&address, 8 << 20).unwrap();
    for round in 0..2 {
        rig.fill(0..1500, round);
        rig.await_copies();
        assert_eq!(rig.check(0..1500, round), 0);
    }
    assert!(rig.figure("remote_reads") > 0);
    println!("{LIVE}{}", rig.figure("remote_size"));
    std::io::stdin().read_line(&mut String::new()).unwrap();
    rig.tiers().clear();
}

/// A process reports the bytes of its live segments by this line.
const LIVE: &str = "live bytes ";

#[test]
fn sixteen_processes_share_a_cluster() {
    if !has_server() {
        return skip("no server: ./setup tests installs it");
    }
    let cluster = Cluster::start(5000);
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", "one_of_sixteen", "--nocapture"]);
    program.stdin(Stdio::piped()).stdout(Stdio::piped());
    program.env("UZSWAP_TEST_STORE", cluster.backing("client=shared"));
    let mut processes: Vec<_> = (0..16).map(|_| program.spawn().unwrap()).collect();
    let live = processes.iter_mut().map(|process| {
        let mut lines = BufReader::new(process.stdout.as_mut().unwrap()).lines();
        let line = lines.find_map(|line| Some(line.unwrap().split_once(LIVE)?.1.to_owned()));
        line.expect("it has checked its pages").parse::<u64>().unwrap()
    });
    let live: u64 = live.sum();
    let there = || cluster.primaries().iter().map(|at| cluster.servers[*at].value_bytes()).sum();
    let is_near = || u64::abs_diff(there(), live) * 10 < live;
    await_that("the store has the live bytes, to a tenth", is_near);
    for process in processes {
        // wait_with_output closes the process's standard input, so the process ends.
        let output = process.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    let left: usize =
        cluster.primaries().iter().map(|at| cluster.servers[*at].keys("uz:*").len()).sum();
    assert_eq!(left, 0, "each has removed its own");
}

#[test]
fn a_server_with_tls_is_known_by_its_certificate() {
    if !has_server() {
        return skip("no server: ./setup tests installs it");
    }
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path());
    let ca = format!("ca={}", folder.path().join("ca.crt").display());
    let good = Server::with_tls(folder.path(), "good");
    let rig = Rig::new(&good.backing_with_tls(&ca), 64 << 20).unwrap();
    rig.fill(0..PAGES, 0);
    rig.await_copies();
    assert_eq!(rig.check(0..PAGES, 0), 0);
    assert!(rig.figure("remote_reads") > 0);
    assert_eq!(rig.figure("remote_errors"), 0);
    let refused = |address: &str, part: &str| {
        let error = Rig::new(address, 64 << 20).err().unwrap();
        assert!(error.contains(part) && !error.contains('\n'), "{address}: {error}");
    };
    let other = format!("ca={}", folder.path().join("other.crt").display());
    refused(&good.backing_with_tls(&other), "UnknownIssuer; check the server's certificate");
    let address = good.backing_with_tls(&ca).replace("localhost", "127.0.0.1");
    refused(&address, "check the server's certificate");
    refused(&good.backing_with_tls("ca=/no/such/file"), "name a file in PEM");
    refused(&good.backing(&ca).replace("valkey:", "valkeys:"), "check");
    refused(&good.backing_with_tls("").replace("valkeys:", "valkey:"), "check");
    let expired = Server::with_tls(folder.path(), "expired");
    refused(&expired.backing_with_tls(&ca), "expired");
}

#[test]
fn a_cluster_with_slots_that_no_server_has_is_refused() {
    if !has_server() {
        return skip("no server: ./setup tests installs it");
    }
    let one = Server::start(&["--cluster-enabled", "yes"]);
    let error = Rig::new(&one.backing(""), 64 << 20).err().unwrap();
    assert!(error.contains("of its 16384 slots have no server"), "{error}");
}

#[test]
fn without_a_disk_there_is_as_much_space_as_the_store_gives() {
    let Some(server) = server(&[]) else { return };
    let address = Address::parse(&server.backing("copies=2&max=1G")).unwrap();
    let connected = Connected::to(&address).unwrap();
    assert_eq!(connected.file_bytes(4 << 20), (1 << 30) + (4 << 20));
    let tiers = connected.over(Box::new(NoBacking), 0).unwrap();
    assert_eq!((tiers.bytes(), tiers.takes_pages()), (1 << 30, false));
}

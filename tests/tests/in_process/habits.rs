//! `uzswap run --in-process`: signals, stacks, forks and calls work in a part of the memory as they
//! do in all of it. Each habit is a function of a program in `habits/`, and prints a few lines,
//! which must be the same in both cases.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use uzswap_tests::{OWN_CALL, habit_folder, run_habit};

/// A folder with one of the programs.
fn folder(program: &str) -> tempfile::TempDir {
    // Makes cleanup handlers run by the unwinder.
    let folder = habit_folder(program, &["-fexceptions"]);
    if program == "mappings.c" {
        make_library(folder.path());
    }
    if program == "libraries.c" {
        let mut compiler = Command::new("cc");
        compiler.args(["-DAUDIT", "-O1", "-w", "-shared", "-fPIC", "-o", "audit.so"]);
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("habits").join(program);
        assert!(compiler.arg(source).current_dir(&folder).status().unwrap().success());
    }
    folder
}

fn said(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{}: {out}{err}", output.status);
    out.into_owned()
}

const RUN: &str = "./uzswap run --in-process --memory 32M --";

/// Compares each habit's output with and without uzswap. uzswap must keep the process small, unless
/// the habit has memory to spare. The shell runs `before` first.
fn compare_with(program: &str, habits: &[&str], before: &str) {
    let folder = folder(program);
    for habit in habits {
        let alone = run_habit(folder.path(), &format!("{before} ./program {habit}"));
        let with = run_habit(folder.path(), &format!("{before} {RUN} ./program {habit}"));
        assert_eq!(said(&with), said(&alone), "{habit}");
        let told = String::from_utf8_lossy(&with.stderr).into_owned();
        // `meanwhile` holds the dynamic linker's lock, for which the take-over may wait too long.
        let has_room = ["locked", "stopped", "meanwhile"].contains(habit);
        assert!(has_room || !told.contains("memory of 0 processes"), "{habit}: {told}");
    }
}

fn compare(program: &str, habits: &[&str]) {
    compare_with(program, habits, "");
}

#[test]
fn handlers_run_where_they_would_have_run() {
    compare("signals.c", &["large_frames", "places", "early_stack", "no_stack", "coroutines"]);
}

#[test]
fn handlers_may_never_come_back() {
    compare("signals.c", &["overflows", "jumps_out_of_read"]);
}

#[test]
fn handlers_may_block_all_signals_and_see_where_a_program_is() {
    compare("signals.c", &["masks", "tells_where"]);
}

#[test]
fn a_handler_may_leave_a_call_for_another_stack_and_come_back() {
    for means in ["userfaultfd", "guards"] {
        compare_with("signals.c", &["preempted"], &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn signals_of_faults_are_ignored_where_a_process_sends_them() {
    compare("signals.c", &["ignored"]);
}

#[test]
fn a_library_may_set_handlers_past_the_preloaded_one() {
    compare("signals.c", &["past_other_libraries"]);
}

#[test]
fn a_thread_that_waits_in_a_call_is_cancelled() {
    compare("signals.c", &["cancels"]);
}

#[test]
fn a_thread_is_cancelled_while_its_pages_come_in() {
    for means in ["userfaultfd", "guards"] {
        let before = format!("export UZSWAP_MEANS={means};");
        compare_with("signals.c", &["cancels_anywhere"], &before);
    }
}

#[test]
fn a_thread_may_have_the_smallest_stack_that_there_is() {
    compare("signals.c", &["small_stacks", "small_stack_waits", "many_small_stacks"]);
}

#[test]
fn processes_read_and_write_memory_of_others_that_is_out() {
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        let before = format!("export UZSWAP_MEANS={means};");
        compare_with("visits.c", &["large", "small"], &before);
    }
}

#[test]
fn a_process_that_is_stopped_or_killed_keeps_no_other_waiting() {
    compare("visits.c", &["killed", "stopped"]);
}

#[test]
fn timers_that_start_threads_go_on() {
    compare("signals.c", &["rings_in_threads"]);
}

#[test]
fn a_program_whose_user_may_queue_no_signals_is_kept_small() {
    compare_with("signals.c", &["nothing_queued"], "ulimit -i 0;");
}

#[test]
fn calls_at_the_edges_of_pages_files_and_lists_answer_as_the_kernel_does() {
    let habits = [
        "page_ends",
        "direct",
        "long_lists",
        "strings",
        "guards_behind_holes",
        "same_byte",
        "refused",
    ];
    for means in ["userfaultfd", "guards", "protection"] {
        compare_with("edges.c", &habits, &format!("export UZSWAP_MEANS={means};"));
    }
}

/// A library with its own system call, which a program loads late.
const LIBRARY: &str = "
long call(long number, long a, long b, long c) { return own_call(number, a, b, c, 0, 0, 0); }
";

fn make_library(folder: &Path) {
    fs::write(folder.join("library.c"), [OWN_CALL, LIBRARY].concat()).unwrap();
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-shared", "-fPIC", "-o", "library.so", "library.c"]);
    assert!(compiler.current_dir(folder).status().unwrap().success());
    fs::copy(folder.join("library.c"), folder.join("program.c")).unwrap();
}

#[test]
fn memory_keeps_its_kind() {
    compare("mappings.c", &["children", "kinds", "low", "joined", "advice", "moves"]);
}

#[test]
fn memory_that_is_reserved_and_used_late_leaves_by_each_means() {
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        let before = format!("export UZSWAP_MEANS={means};");
        compare_with("mappings.c", &["sparse", "late"], &before);
    }
}

#[test]
fn memory_that_children_do_not_inherit_leaves_where_pages_are_moved() {
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        compare_with("mappings.c", &["uninherited"], &format!("export UZSWAP_MEANS={means};"));
    }
    let folder = folder("mappings.c");
    for (means, stays) in [("userfaultfd", false), ("guards", true)] {
        let with =
            run_habit(folder.path(), &format!("UZSWAP_MEANS={means} {RUN} ./program uninherited"));
        let told = String::from_utf8_lossy(&with.stderr);
        assert_eq!(told.contains("children do not inherit this memory"), stays, "{means}: {told}");
    }
}

#[test]
fn addresses_that_a_program_has_given_back_stay_free() {
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        compare_with("mappings.c", &["holes"], &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn threads_of_ours_have_stacks_where_a_program_maps_nothing() {
    compare("forks.c", &["stacks"]);
}

/// The bytes of a part that stays in memory, from the report.
fn stays(output: &Output, why: &str) -> f64 {
    let told = String::from_utf8_lossy(&output.stderr);
    let line = told.lines().find(|line| line.contains(why)).unwrap_or_default();
    let size = line.rsplit_once(", ").and_then(|(_, size)| size.strip_suffix(" MiB of it)"));
    size.map_or(0.0, |size| size.parse().unwrap())
}

#[test]
fn memory_that_stays_is_named_with_all_of_it_whenever_it_came() {
    let folder = folder("mappings.c");
    let with =
        run_habit(folder.path(), &format!("UZSWAP_MEANS=guards {RUN} ./program written_code"));
    // The report names both parts, each of 12 MiB, except a few pages.
    let mib = stays(&with, "this memory is code");
    assert!((20.0..28.0).contains(&mib), "{mib} MiB: {}", said(&with));
    let told = String::from_utf8_lossy(&with.stderr);
    assert_eq!(told.matches("uzswap: left").count(), 1, "{told}");
}

#[test]
fn calls_see_their_memory_after_the_first_thread_has_ended() {
    compare("calls.c", &["without_first"]);
}

#[test]
fn a_program_ends_with_its_last_thread() {
    compare("calls.c", &["ends_with_threads"]);
}

#[test]
fn a_program_ends_with_the_status_of_a_last_thread_that_ends_by_a_call() {
    compare("calls.c", &["ends_raw"]);
}

#[test]
fn a_pipe_of_packets_has_those_of_the_program() {
    compare("long_calls.c", &["packets"]);
}

#[test]
fn limits_that_a_program_sets_hold_for_its_own_files_alone() {
    for means in ["userfaultfd", "guards"] {
        let before = format!("export UZSWAP_MEANS={means};");
        compare_with("limits.c", &["soft_files", "hard_files"], &before);
    }
    compare("limits.c", &["stays"]);
}

#[test]
fn libraries_of_other_namespaces_see_memory_that_is_out() {
    for means in ["userfaultfd", "guards"] {
        let before = format!("export UZSWAP_MEANS={means};");
        compare_with("libraries.c", &["early_namespace", "late_namespace"], &before);
    }
    // The thread-local variables of a debug build do not fit beside those of the audit library.
    let room = "export GLIBC_TUNABLES=glibc.rtld.optional_static_tls=8192;";
    let before = format!("{room} export LD_AUDIT=./audit.so;");
    compare_with("libraries.c", &["audited"], &before);
}

#[test]
fn an_error_of_the_dynamic_linker_stays_until_the_program_asks_for_it() {
    compare("libraries.c", &["keeps_errors"]);
}

#[test]
fn a_program_that_writes_system_calls_as_it_runs_is_left_alone() {
    let folder = folder("libraries.c");
    for habit in ["early_code", "late_code", "early_writable_code"] {
        let output = run_habit(folder.path(), &format!("{RUN} ./program {habit}"));
        assert_eq!(said(&output), "30000\n", "{habit}");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains("generates code that makes system calls"), "{habit}: {told}");
    }
}

#[test]
fn a_file_that_a_program_changes_for_itself_is_named() {
    let folder = folder("calls.c");
    let with = run_habit(folder.path(), &format!("{RUN} ./program copies"));
    assert_eq!(said(&with), "0\n");
    let told = String::from_utf8_lossy(&with.stderr);
    let mib = stays(&with, "its own copy of a file");
    assert!((18.0..28.0).contains(&mib), "{mib} MiB: {told}");
    assert!(!told.contains("too few for so many"), "{told}");
}

#[test]
fn memory_with_guards_in_it_leaves() {
    let folder = folder("mappings.c");
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        compare_with("mappings.c", &["guarded"], &format!("export UZSWAP_MEANS={means};"));
        let with =
            run_habit(folder.path(), &format!("UZSWAP_MEANS={means} {RUN} ./program guarded"));
        assert_eq!(stays(&with, "stack of a thread"), 0.0, "{means}: {}", said(&with));
    }
}

#[test]
fn memory_that_is_only_read_leaves_too() {
    compare("mappings.c", &["read_only"]);
}

#[test]
fn code_that_is_loaded_late_keeps_its_length_and_access() {
    compare("mappings.c", &["code"]);
}

#[test]
fn code_that_may_be_written_stays_so() {
    compare("mappings.c", &["own_code"]);
}

#[test]
fn a_shared_segment_is_attached_over_memory_by_each_means() {
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        compare_with("mappings.c", &["attached"], &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn a_program_that_clears_its_environment_has_a_backing() {
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        compare_with("mappings.c", &["titled"], &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn threads_with_names_of_ours_are_the_program_s() {
    compare("mappings.c", &["named_as_ours"]);
}

#[test]
fn a_program_that_no_process_may_trace_forks() {
    compare("mappings.c", &["undumpable"]);
}

#[test]
fn calls_that_are_made_elsewhere_are_seen() {
    compare("mappings.c", &["elsewhere", "meanwhile", "asynchronous"]);
}

#[test]
fn a_program_may_have_its_calls_be_signals() {
    compare("mappings.c", &["dispatched"]);
}

#[test]
fn a_program_may_forbid_itself_all_calls_but_two() {
    compare("mappings.c", &["filtered"]);
}

#[test]
fn a_program_with_few_addresses_is_kept_small() {
    compare_with("mappings.c", &["moves"], "ulimit -v 1000000;");
}

#[test]
fn a_program_that_may_have_few_descriptors_is_kept_small_or_named() {
    let folder = folder("forks.c");
    let cases = [("userfaultfd", 13), ("userfaultfd", 15), ("userfaultfd", 24), ("guards", 13)];
    for (means, limit) in cases {
        let limited = format!("sh -c 'ulimit -n {limit}; exec ./program ways'");
        let with = run_habit(folder.path(), &format!("UZSWAP_MEANS={means} {RUN} {limited}"));
        let told = String::from_utf8_lossy(&with.stderr).into_owned();
        let told = format!("{means}, {limit}: {told}");
        assert_eq!(said(&with), said(&run_habit(folder.path(), &limited)), "{told}");
        let is_small = told.contains("memory of 1 processes was kept small");
        let reason = format!("its limit of {limit} descriptors leaves too few for ours");
        assert!(is_small || told.contains(&reason), "{told}");
    }
}

#[test]
fn a_child_whose_tracer_keeps_the_signals_of_faults_goes_on() {
    compare("forks.c", &["traces"]);
    compare_with("forks.c", &["traces"], "UZSWAP_MEANS=protection");
}

#[test]
fn forks_wait_for_locks_of_the_programs() {
    compare("forks.c", &["locked", "locked_and_short", "stopped"]);
}

#[test]
fn no_child_is_left_alone_because_the_thread_that_watches_is_at_work() {
    let folder = folder("forks.c");
    let with = run_habit(folder.path(), &format!("{RUN} ./program ahead"));
    assert_eq!(said(&with), "200 forks\n");
    let told = String::from_utf8_lossy(&with.stderr);
    assert!(!told.contains("runs without"), "{told}");
    assert!(!told.contains("memory of 0 processes"), "{told}");
}

#[test]
fn all_ways_to_fork_make_the_same_child() {
    compare("forks.c", &["ways", "handles_in_child", "waiting_calls"]);
}

#[test]
fn a_child_that_may_have_no_thread_is_left_alone_and_named() {
    for means in ["userfaultfd", "guards"] {
        compare_with("forks.c", &["no_threads"], &format!("export UZSWAP_MEANS={means};"));
    }
    let folder = folder("forks.c");
    let with = run_habit(folder.path(), &format!("{RUN} ./program no_threads"));
    let told = String::from_utf8_lossy(&with.stderr);
    assert!(told.contains("it was forked where no thread can be started"), "{told}");
}

#[test]
fn a_program_goes_on_when_its_first_thread_has_ended() {
    for means in ["userfaultfd", "guards"] {
        let ends = ["first_ends_early", "first_ends_late"];
        compare_with("forks.c", &ends, &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn descriptors_that_a_process_shares_with_nobody_are_its_own() {
    compare("forks.c", &["own_descriptors", "threads_descriptors"]);
}

#[test]
fn a_thread_with_descriptors_of_its_own_is_named() {
    let folder = folder("forks.c");
    for habit in ["threads_descriptors", "own_descriptors_before"] {
        let with = run_habit(folder.path(), &format!("{RUN} ./program {habit}"));
        assert_eq!(said(&with), said(&run_habit(folder.path(), &format!("./program {habit}"))));
        let told = String::from_utf8_lossy(&with.stderr);
        assert!(told.contains("has descriptors of its own"), "{habit}: {told}");
    }
}

#[test]
fn a_program_is_started_with_long_arguments_while_others_need_all_memory() {
    compare("forks.c", &["long_arguments"]);
}

#[test]
fn a_program_that_counts_its_threads_sees_its_own() {
    compare("forks.c", &["counts_itself"]);
}

#[test]
fn a_child_that_begins_without_handlers_reads_memory_that_is_out() {
    for means in ["userfaultfd", "guards"] {
        compare_with("forks.c", &["cleared"], &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn threads_that_have_the_variables_of_another_one_are_found_and_named() {
    let shares = ["shares_memory", "shares_all", "shares_as_thread", "other_block"];
    for means in ["userfaultfd", "guards"] {
        compare_with("forks.c", &shares, &format!("export UZSWAP_MEANS={means};"));
    }
    let folder = folder("forks.c");
    for habit in ["shared_memory_before", "shared_as_thread_before"] {
        let with = run_habit(folder.path(), &format!("{RUN} ./program {habit}"));
        assert_eq!(said(&with), said(&run_habit(folder.path(), &format!("./program {habit}"))));
        let told = String::from_utf8_lossy(&with.stderr);
        assert!(told.contains("has the variables of another thread"), "{habit}: {told}");
    }
}

#[test]
fn the_next_owner_of_a_robust_lock_is_told_that_the_last_one_has_ended() {
    compare("calls.c", &["robust"]);
    compare_with("calls.c", &["robust"], "export UZSWAP_MEANS=guards;");
}

#[test]
fn a_program_reads_and_writes_its_memory_by_the_kernel_s_file() {
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        compare_with("calls.c", &["own_memory"], &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn forks_go_on_where_no_file_may_be_opened() {
    compare("forks.c", &["confined"]);
}

#[test]
fn bytes_that_one_call_appends_to_a_file_stay_together() {
    compare("calls.c", &["appends"]);
}

#[test]
fn a_program_may_close_all_its_descriptors_at_any_time() {
    compare("calls.c", &["closed_wholesale"]);
}

#[test]
fn calls_with_long_buffers_leave_memory_to_other_threads() {
    compare("calls.c", &["long_buffers", "long_vectors"]);
}

#[test]
fn memory_that_a_structure_refers_to_is_brought_in_however_far_it_is() {
    compare("long_calls.c", &["waits_for_many", "filters", "nodes"]);
    let before = "export UZSWAP_MEANS=guards;";
    compare_with("long_calls.c", &["waits_for_many", "filters", "nodes"], before);
}

#[test]
fn calls_that_move_more_than_is_pinned_at_once_move_all_of_it() {
    compare("long_calls.c", &["many_messages", "streams", "copies", "devices"]);
    let before = "export UZSWAP_MEANS=protection;";
    compare_with("long_calls.c", &["many_messages", "streams", "copies", "devices"], before);
}

#[test]
fn a_pipe_gets_as_much_of_a_program_s_memory_as_it_has_room_for() {
    compare("long_calls.c", &["pipes"]);
}

#[test]
fn a_length_beyond_all_memory_is_refused_and_nothing_is_moved() {
    compare("long_calls.c", &["beyond"]);
}

#[test]
fn threads_that_read_one_open_file_get_whole_blocks() {
    compare("long_calls.c", &["positions"]);
}

#[test]
fn a_mapping_that_the_kernel_could_not_make_is_gone_and_nothing_else() {
    for means in ["userfaultfd", "userfaultfd-copies", "guards", "protection"] {
        compare_with("changes.c", &["fails"], &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn a_program_removes_guards_of_its_own_only() {
    compare_with("changes.c", &["guards"], "export UZSWAP_MEANS=guards;");
}

#[test]
fn buffers_of_calls_that_wait_change_as_they_would() {
    for means in ["userfaultfd", "guards"] {
        compare_with("changes.c", &["meanwhile"], &format!("export UZSWAP_MEANS={means};"));
    }
}

#[test]
fn a_program_serves_faults_of_its_own_from_memory_that_is_out() {
    compare("changes.c", &["own_faults"]);
}

#[test]
fn memory_beside_the_stacks_of_threads_leaves() {
    compare("changes.c", &["beside_threads"]);
}

#[test]
fn a_program_that_would_have_a_ring_of_the_kernel_s_does_without_and_is_kept_small() {
    let folder = folder("calls.c");
    let with = run_habit(folder.path(), &format!("{RUN} ./program ring"));
    assert_eq!(said(&with), said(&run_habit(folder.path(), "./program ring")));
    let told = String::from_utf8_lossy(&with.stderr);
    assert!(told.contains("program: io_uring is refused"), "{told}");
}

#[test]
fn a_file_is_read_and_written_past_the_page_cache() {
    compare("calls.c", &["direct"]);
    compare_with("calls.c", &["direct"], "export UZSWAP_MEANS=guards;");
}

#[test]
fn a_bad_pointer_is_an_error_and_nothing_else() {
    compare("calls.c", &["bad_pointers"]);
}

#[test]
fn a_call_that_finds_no_room_for_its_answer_is_made_once() {
    compare("calls.c", &["done_once"]);
}

#[test]
fn a_program_of_one_thread_may_take_a_user_namespace() {
    compare("calls.c", &["namespaces"]);
}

#[test]
fn a_folder_that_may_not_be_written_is_not_used() {
    let folder = folder("signals.c");
    let path = folder.path().join("other");
    fs::create_dir(&path).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o500)).unwrap();
    let with =
        run_habit(folder.path(), &format!("XDG_RUNTIME_DIR=$PWD/other {RUN} ./program masks"));
    assert_eq!(said(&with), "1, 0 then 1\n");
}

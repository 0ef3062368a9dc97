/* Processes: children of all kinds, other programs, and lost privileges. */
#include "history.h"
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/prctl.h>

extern char **environ;

void say_status(const struct operation *operation, int status) {
    static _Thread_local char text[32];
    if (WIFSIGNALED(status)) {
        const char *name = sigabbrev_np(WTERMSIG(status));
        snprintf(text, sizeof text, "killed by %s", name ? name : "a signal");
    } else
        snprintf(text, sizeof text, "ended with %d", WEXITSTATUS(status));
    say_text(operation, text);
}

int path_of(char *path, const char *kind, long number) {
    return sprintf(path, "%s%ld", kind, number);
}

static pid_t wait_for(pid_t child, int *status) {
    pid_t waited;
    do waited = waitpid(child, status, 0);
    while (waited < 0 && errno == EINTR);
    return waited;
}

static _Noreturn void do_child(const struct operation *operation) {
    run_block(operation);
    _exit(operation->at % 64);
}

static int do_child_on_stack(void *operation) {
    do_child(operation);
}

static char child_stack[1 << 20] __attribute__((aligned(64)));

static pid_t make_child(const struct operation *operation, long how) {
    switch (how) {
    case 0: return fork();
    case 1: return _Fork();
    case 2: return syscall(SYS_fork);
    case 3: return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    case 4: return clone(do_child_on_stack, child_stack + sizeof child_stack, SIGCHLD, (void *)operation);
    default: return fork();
    }
}

/* fork HOW: a child performs the block, and the parent waits for it. */
static void op_fork(const struct operation *operation) {
    int status;
    pid_t child = make_child(operation, operation->argument[0]);
    if (child == 0) do_child(operation);
    if (child < 0)
        say(operation, -1, 0);
    else if (wait_for(child, &status) == child)
        say_status(operation, status);
    else
        say_text(operation, "the child is nobody's");
}

/* vfork: a child performs the block in the parent's memory. */
static void op_vfork(const struct operation *operation) {
    int status;
    volatile pid_t child = vfork();
    if (child == 0) {
        run_block(operation);
        _exit(7);
    }
    if (child < 0)
        say(operation, -1, 0);
    else if (wait_for(child, &status) == child)
        say_status(operation, status);
}

/* later: a child performs the block when the parent joins it. */
enum { LATER = 8 };
static struct {
    pid_t child;
    uint32_t *turn;
} later[LATER];

static void op_later(const struct operation *operation) {
    int at = 0;
    while (at < LATER && later[at].child) at++;
    if (at == LATER) return;
    uint32_t *turn = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (turn == MAP_FAILED) return;
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        memset(later, 0, sizeof later);
        while (!__atomic_load_n(turn, __ATOMIC_ACQUIRE)) syscall(SYS_futex, turn, FUTEX_WAIT, 0, NULL, NULL, 0);
        do_child(operation);
    }
    if (child > 0) later[at].child = child, later[at].turn = turn;
    say(operation, child < 0 ? -1 : 0, 0);
}

static void op_join(const struct operation *operation) {
    for (int at = 0, status; at < LATER; at++) {
        if (!later[at].child) continue;
        __atomic_store_n(later[at].turn, 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, later[at].turn, FUTEX_WAKE, 1, NULL, NULL, 0);
        if (wait_for(later[at].child, &status) == later[at].child) say_status(operation, status);
        munmap(later[at].turn, PAGE);
        later[at].child = 0;
    }
}

/* forks COUNT: forks children one after the other. Each checks all memory. */
static void op_forks(const struct operation *operation) {
    long well = 0;
    uint64_t sum = sum_of_all();
    for (long turn = 0; turn < operation->argument[0]; turn++) {
        int status = 1;
        pid_t child = fork();
        if (child == 0) _exit(turn % 8 == 0 && sum_of_all() != sum);
        if (child > 0 && wait_for(child, &status) == child) well += status == 0;
    }
    say(operation, well, sum);
}

/* crowd COUNT SLOT: children and parent change their copies of a slot at the same time. */
static void op_crowd(const struct operation *operation) {
    pid_t children[8];
    long count = operation->argument[0] % 9, well = 0;
    struct slot *slot = slot_of(operation, 1);
    if (slot->is_shared) return;
    for (long at = 0; at < count; at++) {
        children[at] = fork();
        if (children[at]) continue;
        for (long turn = 0; turn < 4; turn++) {
            uint64_t seed = at * 100 + turn;
            if (!slot->at) _exit(0);
            fill(slot->at, slot->pages, seed);
            page_out(slot->at, slot->pages * PAGE);
            uint64_t first, value;
            for (long page = 0; page < slot->pages; page++) {
                if (peek(slot->at + page * PAGE, &value) || mix(seed, page) % 8 == 0) continue;
                if (mix(seed, page) % 4 == 1 && value != mix(seed, page)) _exit(3);
                first = value, (void)first;
            }
        }
        _exit(0);
    }
    if (slot->at) fill(slot->at, slot->pages, operation->at);
    for (long at = 0; at < count; at++) {
        int status = 1;
        if (children[at] > 0 && wait_for(children[at], &status) == children[at]) well += status == 0;
    }
    say(operation, well, sum_of_slot(slot));
}

/* spawn HOW [SLOT]: starts this program by posix_spawn, fork or vfork, to perform the block. With a slot, its arguments are
   in memory that is paged out. */
static void op_spawn(const struct operation *operation) {
    char number[12], *words[] = {program, history, number, NULL}, **given = words;
    struct slot *slot = slot_of(operation, 1);
    uint64_t value;
    int status;
    pid_t child = -1;
    sprintf(number, "%d", operation->at);
    if (operation->arguments > 1 && slot->at && slot->pages > 2 && !peek(slot->at, &value) &&
        !poke(slot->at + 2 * PAGE - 8, 0) && !poke(slot->at + PAGE, 0) && !poke(slot->at, value)) {
        given = (char **)(slot->at + PAGE - 2 * sizeof *given);
        char *at = slot->at + PAGE + 64;
        for (int word = 0; word < 3; word++) at = stpcpy(given[word] = at, words[word]) + 1;
        given[3] = NULL;
        page_out(slot->at, 2 * PAGE);
    }
    switch (operation->argument[0]) {
    case 0:
        if (posix_spawn(&child, "/proc/self/exe", NULL, NULL, given, environ)) child = -1;
        break;
    case 1:
        if (!(child = fork())) execve("/proc/self/exe", given, environ), _exit(95);
        break;
    default:
        if (!(child = vfork())) execve("/proc/self/exe", given, environ), _exit(95);
    }
    if (child < 0)
        say(operation, -1, 0);
    else if (wait_for(child, &status) == child)
        say_status(operation, status);
    /* The arguments' addresses differ between runs. */
    if (given != words) memset(slot->at, 0, 2 * PAGE);
}

/* bad-exec: arguments at addresses without memory. */
static void op_bad_exec(const struct operation *operation) {
    char *words[] = {program, (char *)16, NULL};
    say(operation, execve("/proc/self/exe", words, environ), 0);
    say(operation, syscall(SYS_execve, "/proc/self/exe", 8, environ), 0);
}

/* dumpable IS-DUMPABLE */
static void op_dumpable(const struct operation *operation) {
    say(operation, prctl(PR_SET_DUMPABLE, operation->argument[0], 0, 0, 0), 0);
}

/* filtered IN-CHILD: performs the block under a filter that permits only the calls for the transcript. */
static void op_filtered(const struct operation *operation) {
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_write, 4, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 3, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    int status;
    pid_t child = operation->argument[0] ? fork() : 0;
    if (child == 0) {
        long answer = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        if (!answer) answer = prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0);
        say(operation, answer, 0);
        do_child(operation);
    }
    if (wait_for(child, &status) == child) say_status(operation, status);
}

/* unshare: enters a new user namespace, in a child with one thread. */
static void op_unshare(const struct operation *operation) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        say(operation, unshare(CLONE_NEWUSER), 0);
        do_child(operation);
    }
    if (wait_for(child, &status) == child) say_status(operation, status);
}

const struct action process_actions[] = {
    {"fork", op_fork}, {"vfork", op_vfork}, {"later", op_later}, {"join", op_join}, {"forks", op_forks}, {"crowd", op_crowd},
    {"spawn", op_spawn}, {"bad-exec", op_bad_exec}, {"dumpable", op_dumpable}, {"filtered", op_filtered}, {"unshare", op_unshare},
    {NULL, NULL}};

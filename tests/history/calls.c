/* Calls with a structure, a text or a place for an answer, at the end of a slot's page or across that end. If libc would
   access that memory itself, the call is made without libc. */
#include "history.h"
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/msg.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysinfo.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/times.h>
#include <sys/uio.h>
#include <sys/utsname.h>

/* Memory for a call, and the number of its bytes for the transcript. */
struct given {
    char *at;
    long looked_at;
};

/* Writes bytes to the given memory. Skips holes. */
static void put(const struct given *given, const void *bytes, long count) {
    for (long byte = 0; byte < count; byte++) {
        char *at = given->at + byte;
        uint64_t value;
        char *word = (char *)((long)at & -8);
        if (!peek(word, &value) && !poke(word, value)) *at = ((const char *)bytes)[byte];
    }
}
static void put_text(const struct given *given, const char *text) {
    put(given, text, strlen(text) + 1);
}

enum {
    OPEN, STAT, ACCESS, MAKE, RENAME, LINK, READLINK, CWD, POLLS, SELECTS, EPOLLS, EVENT, TIMER, TIMER_FILE, NAP, CLOCK, DAY, WAIT_WORD,
    WAKE_WORD, NAMES, LIMIT, SET_LIMIT, USER, AFFINITY, CPU_NAME, PENDING, TIMED, QUEUED, SEND_MESSAGE, RECEIVE_MESSAGE, SEMAPHORE,
    OPTION, SET_OPTION, SOCKET_NAME, MEMORY_FILE, STATFS, OTHER_READ, OTHER_WRITE, WAIT_CHILD, PIPE, RANDOM, USAGE, SIGNAL_MASK,
    SIGNAL_STACK, ACTION, FILE_LOCK, XSTAT, ROBUST, CPU_TIME, CALLS
};

static long on_files(long call, struct given *given, long page) {
    long answer, file;
    switch (call) {
    case OPEN:
        put_text(given, "/dev/null");
        file = answer = open(given->at, O_RDONLY);
        if (file >= 0) close(file);
        return answer < 0 ? -1 : 0;
    case STAT:
        answer = stat("/dev/null", (struct stat *)given->at);
        return answer;
    case XSTAT: put_text(given, "/dev/null"); return statx(-1, given->at, 0, STATX_SIZE, (struct statx *)page);
    case ACCESS: put_text(given, "/dev/null"); return access(given->at, R_OK);
    case MAKE:
        put_text(given, "folder");
        answer = mkdir(given->at, 0700);
        rmdir("folder");
        return answer;
    case RENAME: put_text(given, "none"); return rename(given->at, "other");
    case LINK:
        put_text(given, "target");
        answer = symlink(given->at, "link");
        unlink("link");
        return answer;
    case READLINK: given->looked_at = 8; return readlink("/proc/self/exe", given->at, 4) < 0 ? -1 : 0;
    case CWD: return syscall(SYS_getcwd, given->at, 1000) < 0 ? -1 : 0;
    case MEMORY_FILE:
        put_text(given, "name");
        file = answer = memfd_create(given->at, MFD_CLOEXEC);
        if (file >= 0) close(file);
        return answer < 0 ? -1 : 0;
    case STATFS: return statfs("/proc", (struct statfs *)given->at);
    case PIPE:
        answer = pipe2((int *)given->at, O_CLOEXEC);
        if (!answer) close(((int *)given->at)[0]), close(((int *)given->at)[1]);
        return answer;
    case FILE_LOCK: {
        struct flock of = {.l_type = F_WRLCK};
        file = memfd_create("file", MFD_CLOEXEC);
        put(given, &of, sizeof of);
        answer = fcntl(file, F_SETLK, given->at);
        close(file);
        return answer;
    }
    default: return 0;
    }
}

static long on_waits(long call, struct given *given) {
    struct timespec soon = {0, 1000000};
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 7};
    struct itimerspec at = {{0, 0}, {100, 0}};
    uint64_t number = 3;
    long answer, file;
    switch (call) {
    case POLLS: {
        struct pollfd of = {0, POLLNVAL, 0};
        put(given, &of, sizeof of);
        return poll((struct pollfd *)given->at, 1, 0) < 0 ? -1 : 0;
    }
    case SELECTS: put(given, &(struct timeval){0, 1000}, sizeof(struct timeval)); return syscall(SYS_select, 0, NULL, NULL, NULL, given->at, NULL);
    case EPOLLS:
        file = epoll_create1(EPOLL_CLOEXEC);
        int counter = eventfd(1, EFD_CLOEXEC);
        put(given, &event, sizeof event);
        answer = epoll_ctl(file, EPOLL_CTL_ADD, counter, (struct epoll_event *)given->at);
        if (!answer) answer = epoll_wait(file, (struct epoll_event *)given->at, 2, 100);
        int error = errno;
        close(counter);
        close(file);
        errno = error;
        given->looked_at = 8;
        return answer;
    case EVENT:
        file = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        put(given, &number, sizeof number);
        answer = write(file, given->at, 8) + read(file, given->at, 8);
        error = errno;
        close(file);
        errno = error;
        given->looked_at = 8;
        return answer;
    case TIMER: {
        int timer;
        struct sigevent none = {.sigev_notify = SIGEV_NONE};
        put(given, &none, sizeof none);
        answer = syscall(SYS_timer_create, CLOCK_MONOTONIC, given->at, &timer);
        if (!answer) syscall(SYS_timer_delete, timer);
        return answer;
    }
    case TIMER_FILE:
        file = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
        put(given, &at, sizeof at);
        answer = timerfd_settime(file, 0, (struct itimerspec *)given->at, NULL);
        error = errno;
        close(file);
        errno = error;
        return answer;
    case NAP: put(given, &soon, sizeof soon); return nanosleep((struct timespec *)given->at, NULL);
    case CLOCK: return syscall(SYS_clock_gettime, CLOCK_MONOTONIC, given->at);
    case CPU_TIME: return clock_gettime(CLOCK_PROCESS_CPUTIME_ID, (struct timespec *)given->at);
    case DAY: return syscall(SYS_gettimeofday, given->at, NULL);
    case WAIT_WORD: put(given, &soon, sizeof soon); return syscall(SYS_futex, &(uint32_t){0}, FUTEX_WAIT, 0, given->at, NULL, 0);
    case WAKE_WORD: return syscall(SYS_futex, given->at, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    case TIMED: {
        sigset_t mask;
        sigemptyset(&mask);
        sigaddset(&mask, SIGHUP);
        put(given, &mask, 8);
        return syscall(SYS_rt_sigtimedwait, given->at, NULL, &soon, 8);
    }
    case WAIT_CHILD: {
        pid_t child = fork();
        if (child == 0) _exit(5);
        while ((answer = wait4(child, (int *)given->at, 0, NULL)) < 0 && errno == EINTR);
        error = errno;
        if (answer < 0) waitpid(child, NULL, 0);
        errno = error;
        given->looked_at = 4;
        return answer < 0 ? -1 : 0;
    }
    default: return 0;
    }
}

static long on_itself(long call, struct given *given) {
    cpu_set_t set;
    sigset_t mask;
    struct rlimit limit;
    struct {
        void (*handler)(int);
        long flags, restorer, mask;
    } action = {SIG_IGN, 0, 0, 0};
    siginfo_t info = {.si_code = SI_QUEUE};
    switch (call) {
    case NAMES: return uname((struct utsname *)given->at);
    case LIMIT: given->looked_at = 16; return syscall(SYS_getrlimit, RLIMIT_CORE, given->at);
    case SET_LIMIT:
        getrlimit(RLIMIT_CORE, &limit);
        put(given, &limit, sizeof limit);
        return syscall(SYS_setrlimit, RLIMIT_CORE, given->at);
    case USER: given->looked_at = 4; return getresuid((uid_t *)given->at, &(uid_t){0}, &(uid_t){0});
    case AFFINITY:
        sched_getaffinity(0, sizeof set, &set);
        put(given, &set, 128);
        return sched_setaffinity(0, 128, (cpu_set_t *)given->at);
    case CPU_NAME:
        given->looked_at = 8;
        put_text(given, "history");
        prctl(PR_SET_NAME, "history");
        return prctl(PR_GET_NAME, given->at);
    case PENDING: given->looked_at = 8; return syscall(SYS_rt_sigpending, given->at, 8);
    case QUEUED: put(given, &info, sizeof info); return syscall(SYS_rt_sigqueueinfo, getpid(), 0, given->at);
    case USAGE: return getrusage(RUSAGE_SELF, (struct rusage *)given->at);
    case RANDOM: return syscall(SYS_getrandom, given->at, 300, 0);
    case SIGNAL_MASK:
        sigemptyset(&mask);
        put(given, &mask, 8);
        return syscall(SYS_rt_sigprocmask, SIG_BLOCK, given->at, NULL, 8);
    case SIGNAL_STACK: return sigaltstack(NULL, (stack_t *)given->at);
    case ACTION: put(given, &action, sizeof action); return syscall(SYS_rt_sigaction, SIGHUP, given->at, &action, 8);
    case ROBUST: return syscall(SYS_get_robust_list, 0, given->at, given->at + 8);
    default: return 0;
    }
}

static long on_others(long call, struct given *given) {
    struct {
        long kind;
        char text[200];
    } message = {1, "a text"};
    struct sembuf of = {0, 1, IPC_NOWAIT};
    int ends[2], queue, error, number = 1;
    socklen_t bytes = 4;
    long answer;
    char here[200];
    struct iovec ours = {here, 200}, theirs = {given->at, 200};
    switch (call) {
    case SEND_MESSAGE:
    case RECEIVE_MESSAGE:
        queue = msgget(IPC_PRIVATE, 0600);
        put(given, &message, sizeof message);
        answer = msgsnd(queue, call == SEND_MESSAGE ? (void *)given->at : &message, 200, IPC_NOWAIT);
        if (call == RECEIVE_MESSAGE) answer = msgrcv(queue, given->at, 200, 0, IPC_NOWAIT), given->looked_at = 208;
        error = errno;
        msgctl(queue, IPC_RMID, NULL);
        errno = error;
        return answer;
    case SEMAPHORE:
        queue = semget(IPC_PRIVATE, 1, 0600);
        put(given, &of, sizeof of);
        answer = semop(queue, (struct sembuf *)given->at, 1);
        error = errno;
        semctl(queue, 0, IPC_RMID);
        errno = error;
        return answer;
    case OPTION:
    case SET_OPTION:
    case SOCKET_NAME:
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends)) return -1;
        put(given, &number, sizeof number);
        if (call == OPTION) answer = getsockopt(ends[0], SOL_SOCKET, SO_TYPE, given->at, &bytes), given->looked_at = 4;
        else if (call == SET_OPTION) answer = setsockopt(ends[0], SOL_SOCKET, SO_PASSCRED, given->at, 4);
        else answer = getsockname(ends[0], (struct sockaddr *)given->at, &(socklen_t){100});
        error = errno;
        close(ends[0]), close(ends[1]);
        errno = error;
        return answer;
    case OTHER_READ: return process_vm_readv(getpid(), &ours, 1, &theirs, 1, 0);
    case OTHER_WRITE: memset(here, 1, sizeof here); given->looked_at = 200; return process_vm_writev(getpid(), &ours, 1, &theirs, 1, 0);
    default: return 0;
    }
}

/* call NUMBER SLOT OFFSET IS-OUT: makes one of the calls above. */
static void op_call(const struct operation *operation) {
    static char unused[PAGE];
    long call = operation->argument[0] % CALLS;
    struct slot *slot = slot_of(operation, 1);
    if (!slot->at) return;
    long bytes = PAGE;
    struct given given = {bytes_of(slot, operation->argument[2], &bytes), 0};
    /* Neighbours may not be overwritten. */
    if (bytes < PAGE && !is_apart(slot)) return;
    for (long byte = 0; byte < 512; byte++) put(&(struct given){given.at + byte, 0}, "", 1);
    if (operation->argument[3]) page_out((char *)((long)given.at & -PAGE), 2 * PAGE);
    long answer;
    do {
        errno = 0;
        answer = on_files(call, &given, (long)unused);
        if (!answer && !errno) answer = on_waits(call, &given);
        if (!answer && !errno) answer = on_itself(call, &given);
        if (!answer && !errno) answer = on_others(call, &given);
    } while (answer < 0 && errno == EINTR && is_stopped_at_times());
    int error = answer < 0 ? errno : 0;
    uint64_t sum = 1, value;
    for (long byte = 0; byte < given.looked_at; byte++)
        sum = mix(sum, peek((char *)((long)(given.at + byte) & -8), &value) ? 1 : given.at[byte] + 2);
    for (long byte = 0; byte < 512; byte++) put(&(struct given){given.at + byte, 0}, "", 1);
    errno = error;
    say(operation, answer, sum);
}

const struct action call_actions[] = {{"call", op_call}, {NULL, NULL}};

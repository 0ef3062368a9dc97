/* Threads: stacks of all kinds, concurrent work, cancelled and interrupted calls. */
#include "history.h"
#include <linux/futex.h>
#include <poll.h>
#include <semaphore.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/uio.h>

static __thread unsigned char variables[12000];

static void *do_thread(void *given) {
    const struct operation *operation = given;
    memset(variables, operation->at, sizeof variables);
    run_block(operation);
    long other = 0;
    for (size_t at = 0; at < sizeof variables; at++) other += variables[at] != (unsigned char)operation->at;
    return (void *)other;
}

/* thread STACK KIB: a thread performs the block, and is joined. Its stack is libc's (0), malloc's (1) or mapped (2). */
static void op_thread(const struct operation *operation) {
    pthread_attr_t attributes;
    pthread_t thread;
    long bytes = operation->argument[1] << 10;
    char *stack = NULL;
    void *other = NULL;
    pthread_attr_init(&attributes);
    if (operation->argument[0] == 0) pthread_attr_setstacksize(&attributes, bytes);
    if (operation->argument[0] == 1 && posix_memalign((void **)&stack, 64, bytes)) return;
    if (operation->argument[0] == 2) stack = map(bytes);
    if (stack) {
        fill((char *)(((long)stack + PAGE - 1) & -PAGE), 2, 3);
        pthread_attr_setstack(&attributes, stack, bytes);
    }
    int error = pthread_create(&thread, &attributes, do_thread, (void *)operation);
    pthread_attr_destroy(&attributes);
    if (!error) error = pthread_join(thread, &other);
    say(operation, error, (uint64_t)other + 1);
    if (operation->argument[0] == 1) free(stack);
    if (operation->argument[0] == 2) munmap(stack, bytes);
}

/* After `atfork`, each fork takes this lock. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void take(void) {
    pthread_mutex_lock(&lock);
}
static void give(void) {
    pthread_mutex_unlock(&lock);
}
static void op_atfork(const struct operation *operation) {
    static int is_set;
    if (!is_set++) pthread_atfork(take, give, give);
    say(operation, 0, 0);
}

/* noise KIND: starts a thread that works until `quiet`. */
enum { MAPPING, TOUCHING, ALLOCATING, STOPPING };
static struct {
    volatile int is_quiet, others;
    pthread_t thread;
    pthread_t stopped;
    int is_there;
} noise;
/* Rounds that stop a thread: the last round that began, the last that stopped the thread, and the last that ended. */
static int round_begun, round_stands, round_over;

static void stand(int number) {
    int error = errno, now = __atomic_load_n(&round_begun, __ATOMIC_SEQ_CST);
    __atomic_store_n(&round_stands, now, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&round_over, __ATOMIC_SEQ_CST) < now) syscall(SYS_sched_yield);
    errno = error;
}

static void stop_the_world(void) {
    take();
    int now = __atomic_add_fetch(&round_begun, 1, __ATOMIC_SEQ_CST);
    pthread_kill(noise.stopped, SIGWINCH);
    while (__atomic_load_n(&round_stands, __ATOMIC_SEQ_CST) < now) syscall(SYS_sched_yield);
    __atomic_store_n(&round_over, now, __ATOMIC_SEQ_CST);
    give();
}

static void *make_noise(void *kind) {
    char *kept = (long)kind == TOUCHING ? map(4 * MIB) : NULL;
    /* Between two turns other threads can take the lock. */
    for (uint64_t turn = 0; !noise.is_quiet; usleep(turn++ % 8 ? 0 : 200)) switch ((long)kind) {
        case MAPPING: {
            take();
            char *at = map(5 * MIB);
            if (at) poke(at + MIB, turn), munmap(at, 5 * MIB);
            give();
            break;
        }
        case TOUCHING:
            if (!kept) return NULL;
            take();
            uint64_t *word = (uint64_t *)(kept + turn * 37 % 1024 * PAGE);
            noise.others += *word != 0 && *word != (uint64_t)word;
            *word = (uint64_t)word;
            give();
            if (turn % 1024 == 0) page_out(kept, 4 * MIB);
            break;
        case ALLOCATING: {
            take();
            char *block = malloc(100 + turn % 64 * 4096);
            memset(block, turn, 100);
            give();
            free(block);
            break;
        }
        default: stop_the_world(); usleep(500);
        }
    if (kept) munmap(kept, 4 * MIB);
    return NULL;
}

static void op_noise(const struct operation *operation) {
    if (noise.is_there) return;
    noise.is_quiet = noise.others = 0;
    noise.stopped = 0;
    if (operation->argument[0] == STOPPING) {
        struct sigaction action = {.sa_handler = stand, .sa_flags = SA_RESTART};
        sigaction(SIGWINCH, &action, NULL);
        noise.stopped = pthread_self();
    }
    int error = pthread_create(&noise.thread, NULL, make_noise, (void *)operation->argument[0]);
    noise.is_there = !error;
    say(operation, error, 0);
}

int is_stopped_at_times(void) {
    return noise.is_there && noise.stopped == pthread_self();
}

static void op_quiet(const struct operation *operation) {
    if (!noise.is_there) return;
    noise.is_quiet = 1;
    pthread_join(noise.thread, NULL);
    noise.is_there = 0;
    say(operation, noise.others, 0);
}

/* Blocking calls. */
enum { READ, POLL, SLEEP, FUTEX, RECEIVE, PAUSE, SUSPEND, EPOLL, SELECT, WRITE, ACCEPT, READV, CLOCK, TAKE, WAITING_CALLS };
static const long numbers[] = {SYS_read, SYS_poll, SYS_clock_nanosleep, SYS_futex, SYS_recvfrom, SYS_pause, SYS_rt_sigsuspend,
                               SYS_epoll_wait, SYS_pselect6, SYS_write, SYS_accept, SYS_readv, SYS_clock_nanosleep, SYS_rt_sigtimedwait};

struct waiting {
    const struct operation *operation;
    long call;
    int ends[2];
    volatile int thread;
    char *buffer;
    uint32_t word;
};

static long wait_in_call(struct waiting *waiting) {
    struct pollfd poll_of = {waiting->ends[0], POLLIN, 0};
    /* A thread that is to be cancelled sleeps until then, however late that is. */
    struct timespec time = {waiting->operation ? 60 : 0, 400000000};
    struct epoll_event event = {.events = EPOLLIN};
    sigset_t mask;
    long answer = -1;
    switch (waiting->call) {
    case READ: return read(waiting->ends[0], waiting->buffer, 100);
    case POLL: return poll(&poll_of, 1, -1);
    case SLEEP: return nanosleep(&time, NULL);
    case CLOCK: return clock_nanosleep(CLOCK_MONOTONIC, 0, &time, NULL);
    case FUTEX:
        /* The word may change before the kernel restarts the call. */
        answer = syscall(SYS_futex, &waiting->word, FUTEX_WAIT, 0, NULL, NULL, 0);
        return answer < 0 && errno == EAGAIN ? 0 : answer;
    case RECEIVE: return recv(waiting->ends[0], waiting->buffer, 100, 0);
    case PAUSE: return pause();
    case SUSPEND: sigemptyset(&mask); return sigsuspend(&mask);
    case EPOLL:;
        int set = epoll_create1(EPOLL_CLOEXEC);
        epoll_ctl(set, EPOLL_CTL_ADD, waiting->ends[0], &event);
        answer = epoll_wait(set, (struct epoll_event *)waiting->buffer, 1, -1);
        int error = errno;
        close(set);
        errno = error;
        return answer;
    case SELECT:;
        fd_set readers;
        FD_ZERO(&readers);
        FD_SET(waiting->ends[0], &readers);
        return select(waiting->ends[0] + 1, &readers, NULL, NULL, NULL);
    case WRITE: return write(waiting->ends[1], waiting->buffer, 100);
    case ACCEPT: return accept(waiting->ends[0], (struct sockaddr *)waiting->buffer, &waiting->word);
    case READV:;
        struct iovec vector[2] = {{waiting->buffer, 10}, {waiting->buffer + 2 * PAGE, 90}};
        return readv(waiting->ends[0], vector, 2);
    default:
        sigemptyset(&mask);
        sigaddset(&mask, SIGHUP);
        return sigtimedwait(&mask, NULL, &time);
    }
}

static int prepare(struct waiting *waiting, long call, struct slot *slot) {
    static char own[4 * PAGE];
    uint64_t value;
    /* The calls of an undumpable process cannot be read. */
    if (access("/proc/self/syscall", R_OK)) return -1;
    *waiting = (struct waiting){.call = call % WAITING_CALLS, .buffer = own};
    if (slot->at && slot->pages > 3 && !peek(slot->at + PAGE, &value) && !poke(slot->at + PAGE, value) &&
        !peek(slot->at + 3 * PAGE, &value) && !poke(slot->at + 3 * PAGE, value))
        waiting->buffer = slot->at + PAGE;
    int *ends = waiting->ends, answer;
    if (waiting->call == ACCEPT) {
        ends[1] = -1;
        ends[0] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        struct sockaddr_un {
            sa_family_t family;
            char path[108];
        } name = {AF_UNIX, ""};
        answer = bind(ends[0], (struct sockaddr *)&name, sizeof(sa_family_t)) || listen(ends[0], 1) ? -1 : 0;
        waiting->word = 64;
    } else
        answer = waiting->call == RECEIVE ? socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) : pipe2(ends, O_CLOEXEC);
    if (waiting->call == WRITE && !answer) {
        static char much[1 << 16];
        fcntl(ends[1], F_SETFL, O_NONBLOCK);
        while (write(ends[1], much, sizeof much) > 0);
        fcntl(ends[1], F_SETFL, 0);
    }
    page_out(waiting->buffer, 2 * PAGE);
    return answer;
}

static void finish(struct waiting *waiting) {
    close(waiting->ends[0]);
    if (waiting->ends[1] >= 0) close(waiting->ends[1]);
}

/* Ends the wait. */
static void satisfy(struct waiting *waiting) {
    static char drained[1 << 16];
    struct sockaddr_storage name;
    socklen_t bytes = sizeof name;
    switch (waiting->call) {
    case FUTEX:
        __atomic_store_n(&waiting->word, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &waiting->word, FUTEX_WAKE, 1, NULL, NULL, 0);
        break;
    case WRITE: (void)!read(waiting->ends[0], drained, sizeof drained); break;
    case ACCEPT:
        getsockname(waiting->ends[0], (struct sockaddr *)&name, &bytes);
        connect(waiting->ends[1] = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), (struct sockaddr *)&name, bytes);
        break;
    default: (void)!write(waiting->ends[1], "b", 1);
    }
}

/* Waits until a thread is in its call. True if it is. */
static int is_in_call(const struct waiting *waiting) {
    char path[64], text[32] = "";
    for (int turn = 0; turn < 2000; turn++, usleep(1000)) {
        if (!waiting->thread) continue;
        sprintf(path, "/proc/self/task/%d/syscall", waiting->thread);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) continue;
        long bytes = read(file, text, sizeof text - 1);
        close(file);
        text[bytes < 0 ? 0 : bytes] = 0;
        if (text[0] >= '0' && text[0] <= '9' && atol(text) == numbers[waiting->call]) {
            usleep(2000);
            return 1;
        }
    }
    return 0;
}

static void clean_up(void *waiting) {
    say_text(((struct waiting *)waiting)->operation, "cleaned up");
}

static void *wait_to_be_ended(void *given) {
    struct waiting *waiting = given;
    pthread_cleanup_push(clean_up, waiting);
    waiting->thread = syscall(SYS_gettid);
    long answer = wait_in_call(waiting);
    pthread_testcancel();
    say(waiting->operation, answer, 0);
    pthread_cleanup_pop(0);
    return NULL;
}

/* cancel CALL SLOT: pthread_cancel of a thread in a blocking call. */
static void op_cancel(const struct operation *operation) {
    struct waiting waiting;
    pthread_t thread;
    void *answer = NULL;
    if (prepare(&waiting, operation->argument[0] % FUTEX, slot_of(operation, 1))) return;
    waiting.operation = operation;
    if (pthread_create(&thread, NULL, wait_to_be_ended, &waiting)) return;
    if (!is_in_call(&waiting)) say_text(operation, "it is not in its call");
    pthread_cancel(thread);
    pthread_join(thread, &answer);
    say(operation, answer == PTHREAD_CANCELED, 0);
    finish(&waiting);
}

struct interrupter {
    struct waiting *waiting;
    pthread_t thread;
    int number;
};

/* Waits until a thread has received a signal that it does not block. By then its call may have
 * ended. */
static void await_delivery(int thread, int number) {
    char path[64], text[4096];
    sprintf(path, "/proc/self/task/%d/status", thread);
    for (int turn = 0; turn < 2000; turn++, usleep(1000)) {
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0) continue;
        long bytes = read(file, text, sizeof text - 1);
        close(file);
        text[bytes < 0 ? 0 : bytes] = 0;
        const char *pending = strstr(text, "SigPnd:"), *blocked = strstr(text, "SigBlk:");
        if (!pending || !blocked) continue;
        unsigned long waits = strtoul(pending + 7, NULL, 16) & ~strtoul(blocked + 7, NULL, 16);
        if (!(waits >> (number - 1) & 1)) return;
    }
}

static void *interrupt(void *given) {
    struct interrupter *interrupter = given;
    is_in_call(interrupter->waiting);
    pthread_kill(interrupter->thread, interrupter->number);
    await_delivery(interrupter->waiting->thread, interrupter->number);
    usleep(20000);
    satisfy(interrupter->waiting);
    if (interrupter->waiting->call == PAUSE || interrupter->waiting->call == SUSPEND) {
        usleep(20000);
        if (!interrupter->waiting->word) pthread_kill(interrupter->thread, SIGCONT);
    }
    return NULL;
}

static void go_on(int number) {}

/* interrupt CALL SIGNAL SLOT: a signal arrives during a blocking call. Later the wait ends. */
static void op_interrupt(const struct operation *operation) {
    struct waiting waiting;
    if (prepare(&waiting, operation->argument[0], slot_of(operation, 2))) return;
    struct interrupter interrupter = {&waiting, pthread_self(), operation->argument[1]};
    pthread_t thread;
    struct sigaction action = {.sa_handler = go_on}, before;
    sigaction(SIGCONT, &action, &before);
    if (pthread_create(&thread, NULL, interrupt, &interrupter)) return;
    sigjmp_buf here, *landing = land_at(&here);
    volatile long answer = -2;
    if (!sigsetjmp(here, 1)) {
        waiting.thread = syscall(SYS_gettid);
        answer = wait_in_call(&waiting);
    }
    int error = answer == -2 ? 0 : errno;
    land_at(landing);
    waiting.word = 1;
    pthread_join(thread, NULL);
    if (waiting.call == ACCEPT && answer >= 0) close(answer), answer = 0;
    errno = error;
    say(operation, answer, waiting.buffer[0] + 1);
    sigaction(SIGCONT, &before, NULL);
    finish(&waiting);
}

const struct action thread_actions[] = {{"thread", op_thread}, {"atfork", op_atfork}, {"noise", op_noise}, {"quiet", op_quiet},
                                        {"cancel", op_cancel}, {"interrupt", op_interrupt}, {NULL, NULL}};

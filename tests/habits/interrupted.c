// Handlers that begin while a call changes what is mapped. Such a call blocks signals, so a handler
// begins as soon as it is over.
#include "habit.h"

enum { BYTES = 4 * MIB, FORKS = 20 };

static unsigned char *memory;
static volatile int forks, failed, jumps;
static sigjmp_buf back;

static int is_whole(void) {
    for (int i = 0; i < BYTES; i += PAGE)
        if (memory[i] != 7) return 0;
    return 1;
}

static void ring_every(int microseconds, void (*handler)(int)) {
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
    struct itimerval every = { { 0, microseconds }, { 0, microseconds } };
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &every, NULL);
}

// Each child has the memory of its parent, which is out.
static void forks_here(int signal) {
    int status = -1, before = errno;
    pid_t child = fork();
    if (child == 0) _exit(!is_whole());
    if (waitpid(child, &status, 0) != child || status != 0) failed++;
    forks++;
    errno = before;
    (void)signal;
}

static int start(void) {
    memory = map(BYTES);
    memset(memory, 7, BYTES);
    grow();
    return 0;
}

static int forks_in_handlers(void) {
    start();
    ring_every(10000, forks_here);
    while (forks < FORKS) {
        send_out(memory, BYTES);
        munmap(map(MIB), MIB);
    }
    ring_every(0, SIG_IGN);
    printf("%d\n", failed);
    return 0;
}

// Calls see memory that is out after a handler has jumped out of a call.
static void jumps_away(int signal) {
    jumps++;
    siglongjmp(back, 1);
    (void)signal;
}
static int jumps_out_of_changes(void) {
    int ends[2];
    volatile int moved = 0;
    if (pipe(ends)) return 2;
    start();
    ring_every(2000, jumps_away);
    while (jumps < 100)
        if (!sigsetjmp(back, 1))
            for (;;) {
                madvise(memory, BYTES, MADV_PAGEOUT);
                munmap(map(MIB), MIB);
            }
    ring_every(0, SIG_IGN);
    for (int i = 0; i < BYTES; i += MIB) {
        send_out(memory, BYTES);
        if (write(ends[1], memory + i, 3 * PAGE) != 3 * PAGE) failed++;
        if (read(ends[0], memory + i, 3 * PAGE) == 3 * PAGE) moved++;
    }
    printf("%d moved, %d failed, %d\n", moved, failed, is_whole());
    return 0;
}

// A handler that began before the take-over returns after it. Later handlers begin on the thread's
// own stack, also while the thread waits in a call.
static volatile int has_begun, may_return, handled;
static int ends[2];
static void waits(int signal) {
    for (has_begun = 1; !may_return;) usleep(1000);
    (void)signal;
}
static void looks(int signal) {
    pthread_attr_t attributes;
    char *start, here;
    size_t bytes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, (void **)&start, &bytes);
    pthread_attr_destroy(&attributes);
    if (&here < start || &here >= start + bytes) failed++;
    handled++;
    (void)signal;
}
static void *reads(void *buffer) {
    struct sigaction first = { .sa_handler = waits }, later = { .sa_handler = looks, .sa_flags = SA_RESTART };
    sigaction(SIGUSR1, &first, NULL);
    sigaction(SIGUSR2, &later, NULL);
    pthread_kill(pthread_self(), SIGUSR1);
    return (void *)read(ends[0], buffer, 8 * PAGE);
}
static int handlers_from_before(void) {
    pthread_t thread;
    if (pipe(ends)) return 2;
    pthread_create(&thread, NULL, reads, map(8 * PAGE));
    while (!has_begun) usleep(1000);
    start();
    may_return = 1;
    for (int i = 1; i <= 20; i++) {
        usleep(20000);
        pthread_kill(thread, SIGUSR2);
        while (handled < i) usleep(1000);
    }
    if (write(ends[1], memory, PAGE) != PAGE) return 3;
    void *bytes;
    pthread_join(thread, &bytes);
    printf("%ld read, %d on another stack\n", (long)bytes, failed);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "forks_in_handlers", forks_in_handlers },
        { "jumps_out_of_changes", jumps_out_of_changes },
        { "handlers_from_before", handlers_from_before },
    };
    return choose(all, sizeof all / sizeof *all, arguments > 1 ? argument[1] : "");
}

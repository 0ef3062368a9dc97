// Forks, in all the ways in which programs make them, and what they rely on meanwhile.
#include "habit.h"
#include <semaphore.h>

static unsigned char *memory;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void take(void) { pthread_mutex_lock(&lock); }
static void give(void) { pthread_mutex_unlock(&lock); }

// Waits for a child that says by its status that all is right.
static int is_well(pid_t child) {
    int status = -1;
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static void *map_under_lock(void *unused) {
    for (;;) {
        take();
        munmap(map(5 * MIB), 5 * MIB);
        give();
    }
    return unused;
}
static void *touch_under_lock(void *unused) {
    for (unsigned long s = 1;; s = s * 6364136223846793005UL + 1442695040888963407UL) {
        take();
        for (int i = 0; i < 40; i++) memory[(s >> 20) * (i + 1) % (40 * MIB)]++;
        give();
        sched_yield();
    }
    return unused;
}
static int fork_on(void *(*meanwhile)(void *), int forks) {
    pthread_t thread;
    int well = 0;
    end_after(40);
    pthread_atfork(take, give, give);
    pthread_create(&thread, NULL, meanwhile, NULL);
    for (int i = 0; i < forks; i++) {
        pid_t child = fork();
        if (!child) _exit(0);
        well += is_well(child);
    }
    printf("%d forks\n", well);
    fflush(stdout);
    _exit(0);
}
// The lock is one that handlers of `fork` take, with memory to spare.
static int locked(void) {
    memset(malloc(20 * MIB), 1, 20 * MIB);
    usleep(200000);
    return fork_on(map_under_lock, 300);
}
// The same, short of memory.
static int locked_and_short(void) {
    memory = map(40 * MIB);
    for (long i = 0; i < 40 * MIB; i++) memory[i] = i * 31 >> 5;
    grow();
    return fork_on(touch_under_lock, 40);
}

// A thread stops another one by a signal under that lock, and waits until it stands.
static sem_t stands;
static pthread_t first;
static void stand(int signal) { (void)signal, sem_post(&stands); }
static void *stop_first(void *unused) {
    for (;; usleep(100)) {
        take();
        pthread_kill(first, SIGUSR1);
        while (sem_wait(&stands));
        give();
    }
    return unused;
}
static int stopped(void) {
    struct sigaction action = { .sa_handler = stand, .sa_flags = SA_RESTART };
    memset(malloc(20 * MIB), 1, 20 * MIB);
    usleep(200000);
    sem_init(&stands, 0, 0);
    sigaction(SIGUSR1, &action, NULL);
    first = pthread_self();
    return fork_on(stop_first, 200);
}

// Children that are made past `fork` read what is out, grow, and fork themselves.
static int child_work(void) {
    for (long i = 0; i < 20 * MIB; i += PAGE)
        if (memory[i] != (unsigned char)(i >> 12)) return 2;
    unsigned char *more = malloc(30 * MIB);
    memset(more, 5, 30 * MIB);
    usleep(50000);
    pid_t child = fork();
    if (!child) _exit(memory[PAGE] == 1 && more[MIB] == 5 ? 0 : 3);
    return is_well(child) ? 0 : 4;
}
static int run_child(void *at) { return *(unsigned char *)at == 5 ? child_work() : 5; }
pid_t _Fork(void) __attribute__((weak));
static int ways(void) {
    memory = map(20 * MIB);
    for (long i = 0; i < 20 * MIB; i++) memory[i] = i >> 12;
    grow();
    send_out(memory, 20 * MIB);
    pid_t child = syscall(SYS_fork);
    if (!child) _exit(child_work());
    printf("fork %d\n", is_well(child));
    child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (!child) _exit(child_work());
    printf("clone %d\n", is_well(child));
    struct { unsigned long words[11]; } given = { { 0, 0, 0, 0, SIGCHLD } };
    child = syscall(SYS_clone3, &given, 88);
    if (!child) _exit(child_work());
    printf("clone3 %d\n", is_well(child));
    child = _Fork ? _Fork() : fork();
    if (!child) _exit(child_work());
    printf("_Fork %d\n", is_well(child));
    unsigned char *stack = malloc(MIB);
    child = clone(run_child, stack + MIB, SIGCHLD, memory + 5 * PAGE);
    printf("on a stack %d\n", is_well(child));
    fflush(stdout);
    child = fork();
    if (!child) {
        int ends[2], well = 9;
        if (pipe(ends)) _exit(1);
        pid_t other = fork();
        if (!other) {
            if (daemon(1, 1)) _exit(1);
            well = child_work();
            _exit(write(ends[1], &well, sizeof well) < 0);
        }
        _exit(read(ends[0], &well, sizeof well) == sizeof well ? well : 8);
    }
    printf("daemon %d\n", is_well(child));
    return 0;
}

// Forks again and again while it has more than half of its memory, and is not short of it.
static int ahead(void) {
    int well = 0;
    memset(malloc(19 * MIB), 1, 19 * MIB);
    for (int i = 0; i < 200; i++) {
        pid_t child = fork();
        if (!child) _exit(0);
        well += is_well(child);
        usleep(1000);
    }
    printf("%d forks\n", well);
    grow();
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "locked", locked }, { "locked_and_short", locked_and_short }, { "stopped", stopped },
        { "ways", ways }, { "ahead", ahead },
    };
    return choose(all, sizeof all / sizeof *all, arguments > 1 ? argument[1] : "");
}

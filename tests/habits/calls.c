// Calls that must have exactly the kernel's effects.
#include "habit.h"
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>

// Two processes append to a file. Each block stays in one piece, however long it is.
enum { BLOCK = 18 * MIB, BLOCKS = 3 };
static int appends(void) {
    char name[] = "appended.XXXXXX";
    int start[2], status, mixed = 0, blocks = 0;
    if (close(mkstemp(name)) || pipe(start)) return 2;
    grow();
    for (int i = 0; i < 2; i++)
        if (!fork()) {
            unsigned char *block = map(BLOCK), byte;
            memset(block, 'a' + i, BLOCK);
            int file = open(name, O_WRONLY | O_APPEND);
            if (read(start[0], &byte, 1) != 1) _exit(1);
            for (int turn = 0; turn < BLOCKS; turn++) {
                struct iovec parts[2] = { { block, 5 * MIB + 7 }, { block + MIB, BLOCK - 5 * MIB - 7 } };
                send_out(block, BLOCK);
                long bytes = turn % 2 ? writev(file, parts, 2) : write(file, block, BLOCK);
                if (bytes != BLOCK) _exit(3);
            }
            _exit(0);
        }
    usleep(300000);
    if (write(start[1], "go", 2) != 2) return 2;
    int failed = 0;
    while (wait(&status) > 0) failed += status != 0;
    int file = open(name, O_RDONLY);
    unsigned char *block = map(BLOCK);
    for (; read(file, block, BLOCK) == BLOCK; blocks++) mixed += memcmp(block, block + 1, BLOCK - 1) != 0;
    unlink(name);
    printf("%d blocks, %d mixed, %d failed\n", blocks, mixed, failed);
    return 0;
}

static void say(const char *name, long answer) {
    printf("%s %ld %d\n", name, answer, errno == EFAULT);
}

// A call with a bad pointer fails, and changes nothing.
static int bad_pointers(void) {
    grow();
    char *list[] = { "true", NULL };
    char *strings[] = { "true", (char *)16, NULL };
    say("execve", syscall(SYS_execve, "/bin/true", 8L, 0));
    say("execve", syscall(SYS_execve, "/bin/true", list, -8L));
    say("execve", syscall(SYS_execve, "/bin/true", strings, 0));
    say("sigaction", syscall(SYS_rt_sigaction, SIGUSR1, 8L, 0, 8L));
    say("mask", syscall(SYS_rt_sigprocmask, SIG_BLOCK, 8L, 0, 8L));
    say("stack", syscall(SYS_sigaltstack, 8L, 0));
    say("range", syscall(SYS_close_range, 50L, 30L, 0L));
    int status = 0;
    if (!fork()) {
        signal(SIGUSR1, SIG_IGN);
        execl("/bin/true", "true", NULL);
        _exit(1);
    }
    wait(&status);
    printf("child %d\n", status);
    return 0;
}

// A call that has done its work and then finds no room for the answer must not be done twice.
static void on_alarm(int signal) { (void)signal; }
static int done_once(void) {
    unsigned char *memory = map(MIB);
    memset(memory, 0, MIB);
    grow();
    mprotect(memory, MIB, PROT_READ);
    void *no_room = memory + PAGE;
    pid_t child = fork();
    if (!child) _exit(3);
    say("wait4", syscall(SYS_wait4, child, no_room, 0, 0));
    child = fork();
    if (!child) _exit(3);
    say("waitid", syscall(SYS_waitid, P_PID, child, no_room, WEXITED, 0));
    say("wait", syscall(SYS_wait4, -1, 0, 0, 0));

    struct sockaddr_un name = { AF_UNIX, "" };
    socklen_t bytes = sizeof name;
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0);
    bind(listener, (void *)&name, sizeof(sa_family_t));
    listen(listener, 5);
    getsockname(listener, (void *)&name, &bytes);
    for (int i = 0; i < 3; i++) connect(socket(AF_UNIX, SOCK_STREAM, 0), (void *)&name, bytes);
    say("accept", syscall(SYS_accept, listener, no_room, &(socklen_t){ 100 }));
    say("accept4", syscall(SYS_accept4, listener, no_room, &(socklen_t){ 100 }, 0));
    printf("another %d\n", accept(listener, NULL, NULL) >= 0);

    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    raise(SIGUSR1);
    say("sigtimedwait", syscall(SYS_rt_sigtimedwait, &set, no_room, &(struct timespec){ 0, 0 }, 8L));

    int ends[2], waiting = -1, from = memfd_create("from", 0), to = memfd_create("to", 0);
    if (pipe(ends) || ftruncate(from, MIB)) return 2;
    say("sendfile", syscall(SYS_sendfile, ends[1], from, no_room, 100L));
    say("splice", syscall(SYS_splice, from, no_room, ends[1], 0, 100L, 0));
    say("copy", syscall(SYS_copy_file_range, from, no_room, to, 0, 100L, 0));
    ioctl(ends[0], FIONREAD, &waiting);
    printf("%d in the pipe, %ld in the file\n", waiting, (long)lseek(to, 0, SEEK_CUR));

    struct sigaction action = { .sa_handler = on_alarm };
    struct itimerval soon = { .it_value = { 0, 50000 } };
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &soon, NULL);
    say("nanosleep", syscall(SYS_nanosleep, &(struct timespec){ 2, 0 }, no_room));
    setitimer(ITIMER_REAL, &soon, NULL);
    say("clock", syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &(struct timespec){ 2, 0 }, no_room));
    return 0;
}

// A process with one thread enters a user namespace, with memory to spare and when memory is short.
static int namespaces(void) {
    unsigned char *memory = map(20 * MIB);
    memset(memory, 1, 20 * MIB);
    usleep(300000);
    for (int turn = 0; turn < 2; turn++) {
        pid_t child = fork();
        if (!child) {
            int answer = unshare(CLONE_NEWUSER);
            _exit(answer ? errno : memory[PAGE] - 1);
        }
        int status;
        waitpid(child, &status, 0);
        printf("%d %d\n", WIFEXITED(status), WEXITSTATUS(status));
        if (!turn) grow();
    }
    int answer = unshare(CLONE_NEWUSER), error = errno;
    send_out(memory, 20 * MIB);
    long sum = 0;
    for (long i = 0; i < 20 * MIB; i += PAGE) sum += memory[i];
    printf("%d %d %ld\n", answer, answer ? error : 0, sum);
    return 0;
}

// The program closes all descriptors from 3 on, and opens a file, which must get the number 3. This
// happens in a process that is only watched, and in children of a managed process.
static int reopen(int turns, int pause) {
    char expected[PAGE], found[PAGE];
    int wrong = 0, file = open("program", O_RDONLY);
    long bytes = read(file, expected, PAGE);
    for (int i = 0; i < turns; i++) {
        syscall(SYS_close_range, 3L, ~0U, 0L);
        file = open("program", O_RDONLY);
        for (volatile int spin = 0; spin < 10000; spin++);
        if (pause) usleep(pause);
        long read_bytes = read(file, found, PAGE);
        wrong += file != 3 || read_bytes != bytes || memcmp(found, expected, bytes) || close(file);
    }
    return wrong;
}
static int closed_wholesale(void) {
    int status, failed = 0;
    memset(malloc(14 * MIB), 1, 14 * MIB);
    usleep(300000);
    printf("%d wrong\n", reopen(60000, 0));
    grow();
    for (int i = 0; i < 10; i++) {
        pid_t child = fork();
        if (!child) _exit(reopen(40, 2000) != 0);
        waitpid(child, &status, 0);
        failed += status != 0;
    }
    printf("%d children fail\n", failed);
    return 0;
}

// Reads a file into lists of absent buffers, 24 MiB in all.
static int long_vectors(void) {
    grow();
    unsigned char *memory = map(24 * MIB);
    for (long at = 0; at < 24 * MIB; at++) memory[at] = at >> 12;
    FILE *file = tmpfile();
    if (fwrite(memory, 24 * MIB, 1, file) != 1 || fflush(file)) return 1;
    for (int turn = 0; turn < 4; turn++) {
        memset(memory, 255, 24 * MIB);
        send_out(memory, 24 * MIB);
        // The last call begins at the file's own position, which is 0 again.
        struct iovec parts[] = { { memory, 11 * MIB + 5 }, { memory, 0 },
                                 { memory + 11 * MIB + 5, 13 * MIB - 5 } };
        lseek(fileno(file), turn == 1 ? MIB : 0, SEEK_SET);
        long bytes = turn < 2 ? readv(fileno(file), parts, 3)
            : turn == 2 ? preadv(fileno(file), parts, 3, 3 * MIB)
                        : preadv2(fileno(file), parts, 3, -1, 0);
        long from = turn == 1 ? MIB : turn == 2 ? 3 * MIB : 0, wrong = 0;
        for (long at = 0; at < 24 * MIB; at++)
            wrong += memory[at] != (at < bytes ? (unsigned char)((at + from) >> 12) : 255);
        printf("%ld bytes, %ld wrong, at %ld\n", bytes, wrong, (long)lseek(fileno(file), 0, SEEK_CUR));
    }
    return 0;
}

// Reads and writes files past the page cache, in blocks, from and to absent memory.
static int direct(void) {
    char name[] = "direct.XXXXXX";
    if (close(mkstemp(name))) return 2;
    // Some file systems have no O_DIRECT.
    int file = open(name, O_RDWR | O_DIRECT);
    if (file < 0) file = open(name, O_RDWR);
    unlink(name);
    grow();
    unsigned char *memory = map(16 * MIB);
    for (long at = 0; at < 16 * MIB; at++) memory[at] = at % 251;
    for (int turn = 0; turn < 3; turn++) {
        send_out(memory, 16 * MIB);
        long written = pwrite(file, memory, 16 * MIB, 0), wrong = 0;
        memset(memory, 255, 16 * MIB);
        send_out(memory, 16 * MIB);
        struct iovec parts[] = { { memory, 5 * MIB }, { memory + 5 * MIB, 11 * MIB } };
        long bytes = turn ? pread(file, memory, 16 * MIB, 0) : preadv(file, parts, 2, 0);
        for (long at = 0; at < 16 * MIB; at++) wrong += memory[at] != at % 251;
        printf("%ld written, %ld read, %ld wrong\n", written, bytes, wrong);
    }
    return 0;
}

// Reads and writes the program's own absent memory, by /proc/self/mem.
static int own_memory(void) {
    unsigned char *memory = map(8 * MIB), *other = map(8 * MIB);
    for (long at = 0; at < 8 * MIB; at++) memory[at] = at % 251;
    // This file is opened before the program is kept small.
    int early = open("/proc/self/mem", O_RDWR), wrong = 0, file;
    grow();
    for (int turn = 0; turn < 4; turn++) {
        file = turn == 0 ? early : open("/proc/self/mem", O_RDWR);
        long start = (long)memory + turn * 777, bytes = turn % 2 ? 2 * PAGE : 7 * MIB;
        send_out(memory, 8 * MIB);
        memory[turn * 777] = turn;
        lseek(file, start, SEEK_SET);
        long moved = turn < 2 ? pread(file, other, bytes, start) : read(file, other, bytes);
        wrong += memcmp(memory + turn * 777, other, bytes) != 0;
        send_out(memory, 8 * MIB);
        lseek(file, ++start, SEEK_SET);
        long back = turn < 2 ? pwrite(file, other, bytes, start) : write(file, other, bytes);
        printf("%ld read, %ld written, %d wrong\n", moved, back, wrong);
        wrong += memcmp((void *)start, other, bytes) != 0;
    }
    struct iovec parts[] = { { other, PAGE }, { other + PAGE, 5 * PAGE + 1 } };
    send_out(memory, 8 * MIB);
    printf("%ld read\n", (long)preadv(file, parts, 2, (long)memory));
    wrong += memcmp(memory, other, 6 * PAGE + 1) != 0;
    printf("%d wrong, %ld at 0\n", wrong, (long)pread(file, other, PAGE, 0));
    return 0;
}

// Threads end with robust locks in absent memory. The kernel must inform the next owner.
static unsigned char *locks;
static pthread_mutex_t *lock_at(int number) { return (void *)(locks + number * 2 * PAGE); }
static void *end_with_locks(void *count) {
    for (int i = 0; i < (long)count; i++) pthread_mutex_lock(lock_at(i));
    usleep(600000);
    send_out(locks, MIB);
    return NULL;
}
static int robust(void) {
    enum { LOCKS = 12 };
    pthread_mutexattr_t kind;
    pthread_mutexattr_init(&kind);
    pthread_mutexattr_setrobust(&kind, PTHREAD_MUTEX_ROBUST);
    locks = map(MIB);
    for (int i = 0; i < LOCKS; i++) {
        pthread_mutexattr_setprotocol(&kind, i % 3 ? PTHREAD_PRIO_NONE : PTHREAD_PRIO_INHERIT);
        pthread_mutex_init(lock_at(i), &kind);
    }
    end_after(30);
    for (int turn = 0; turn < 3; turn++) {
        pthread_t thread;
        // The first thread takes its locks before the program is kept small.
        pthread_create(&thread, NULL, end_with_locks, (void *)LOCKS);
        if (turn == 0) grow();
        pthread_join(thread, NULL);
        int told = 0;
        for (int i = 0; i < LOCKS; i++) {
            told += pthread_mutex_lock(lock_at(i)) == EOWNERDEAD;
            pthread_mutex_consistent(lock_at(i));
            pthread_mutex_unlock(lock_at(i));
        }
        printf("told of %d\n", told);
    }
    return 0;
}

// Many threads wait in calls with long buffers, which together are most of the program's memory.
// Another call gets a buffer larger than that memory.
enum { WAITING = 40 };
static struct waiting { int ends[2]; unsigned char *buffer; pthread_t thread; long bytes; } waiting[WAITING];
static void *wait_in_read(void *at) {
    struct waiting *one = at;
    one->bytes = read(one->ends[0], one->buffer, MIB);
    return NULL;
}
static void *discard(void *at) {
    static unsigned char buffer[MIB];
    long sum = 0, bytes;
    while ((bytes = read(*(int *)at, buffer, MIB)) > 0)
        for (long i = 0; i < bytes; i++) sum += buffer[i];
    return (void *)sum;
}
static int long_buffers(void) {
    int wrong = 0, ends[2];
    grow();
    for (int i = 0; i < WAITING; i++) {
        waiting[i].buffer = map(MIB);
        memset(waiting[i].buffer, i + 1, MIB);
        if (pipe(waiting[i].ends) || pthread_create(&waiting[i].thread, NULL, wait_in_read, &waiting[i])) return 2;
    }
    usleep(300000);
    unsigned char *all = map(48 * MIB);
    for (long i = 0; i < 48 * MIB; i++) all[i] = i % 251;
    pthread_t reader;
    void *sum;
    if (pipe(ends) || pthread_create(&reader, NULL, discard, ends)) return 2;
    long written = write(ends[1], all, 48 * MIB);
    close(ends[1]);
    pthread_join(reader, &sum);
    for (int i = 0; i < WAITING; i++) {
        wrong += write(waiting[i].ends[1], "answer", 6) != 6;
        pthread_join(waiting[i].thread, NULL);
        unsigned char *buffer = waiting[i].buffer;
        wrong += waiting[i].bytes != 6 || memcmp(buffer, "answer", 6);
        for (int at = 6; at < MIB; at++) wrong += buffer[at] != i + 1;
    }
    printf("%ld written, their sum %ld, %d wrong\n", written, (long)sum, wrong);
    return 0;
}

// A library sets up an io_uring at the program's start, if the kernel permits that: libuv does.
static int ring(void) {
    unsigned parameters[30] = { 0 };
    int file = syscall(SYS_io_uring_setup, 8L, parameters), error = errno, wrong = 0;
    unsigned char *memory = map(MIB);
    memset(memory, 7, MIB);
    grow();
    send_out(memory, MIB);
    for (int i = 0; i < MIB; i++) wrong += memory[i] != 7;
    printf("%d wrong, %d\n", wrong, file >= 0 || error == ENOSYS || error == EPERM);
    return 0;
}

// A private mapping of a file, which the program changes as it grows.
static int copies(void) {
    char name[] = "/var/tmp/copiesXXXXXX";
    int file = mkstemp(name), sum = unlink(name) + ftruncate(file, 24 * MIB);
    const int access = PROT_READ | PROT_WRITE;
    unsigned char *copy = mmap(NULL, 24 * MIB, access, MAP_PRIVATE, file, 0);
    grow();
    for (int i = 0; i < 24 * MIB; i += PAGE) copy[i] = i >> 12;
    usleep(500000);
    for (int i = 0; i < 24 * MIB; i += PAGE) sum += copy[i] != (unsigned char)(i >> 12);
    printf("%d\n", sum);
    return 0;
}

// The first thread ends before the program grows. Another thread makes calls with absent memory.
static void *do_nothing(void *given) { return given; }
static void *go_on(void *unused) {
    grow();
    unsigned char *memory = map(MIB);
    sigset_t *set = (sigset_t *)memory;
    sigfillset(set);
    send_out(memory, MIB);
    int sum = pthread_sigmask(SIG_BLOCK, set, NULL);
    pthread_t other;
    int error = pthread_create(&other, NULL, do_nothing, NULL);
    if (!error) pthread_join(other, NULL);
    printf("%d %d\n", sum, error);
    exit(0);
    return unused;
}
static int without_first(void) {
    pthread_t other;
    pthread_create(&other, NULL, go_on, NULL);
    pthread_exit(NULL);
}

// The program ends with its last thread.
static void say_end(void) { puts("the end"); }
static void *last(void *given) {
    usleep(300000);
    return given;
}
static int ends_with_threads(void) {
    pthread_t other;
    atexit(say_end);
    end_after(60);
    grow();
    pthread_create(&other, NULL, last, NULL);
    pthread_exit(NULL);
}

// Threads that end by a system call: the process ends with the status of the last one, and the C
// library writes nothing.
static void end_raw(long status) {
    own_call(SYS_exit, status, 0, 0, 0, 0, 0);
}
static void *last_raw(void *given) {
    usleep(100000);
    if (given == (void *)9) end_raw(9);
    if (given) syscall(SYS_exit, given);
    return NULL;
}
static int end_in_way(int way, int is_seen) {
    pthread_t other;
    // uzswap sees a call by the program's own instruction only after the take-over.
    long status[] = { 5, 5, is_seen ? 9 : 8, 0, 0 };
    if (way < 5) pthread_create(&other, NULL, last_raw, (void *)status[way]);
    if (way == 0 || way == 4) pthread_exit(NULL);
    if (way == 6) syscall(SYS_exit, 3);
    end_raw(way == 7 ? 0 : 7);
    return 1;
}
static int ends_raw(void) {
    atexit(say_end);
    end_after(100);
    for (int turn = 0; turn < 16; turn++) {
        int status = 0;
        fflush(stdout);
        if (!fork()) {
            end_after(30);
            if (turn < 8) {
                grow();
            } else {
                // With this memory the program is watched, and not taken over.
                memset(map(14 * MIB), 1, 14 * MIB);
                usleep(100000);
            }
            return end_in_way(turn % 8, turn < 8);
        }
        wait(&status);
        printf("%d: %d\n", turn, status);
    }
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "copies", copies }, { "without_first", without_first },
        { "ends_with_threads", ends_with_threads }, { "ends_raw", ends_raw },
        { "long_vectors", long_vectors },
        { "appends", appends }, { "bad_pointers", bad_pointers }, { "namespaces", namespaces },
        { "closed_wholesale", closed_wholesale }, { "long_buffers", long_buffers },
        { "done_once", done_once }, { "direct", direct }, { "own_memory", own_memory },
        { "robust", robust }, { "ring", ring },
    };
    return choose(all, sizeof all / sizeof *all, arguments > 1 ? argument[1] : "");
}

// Mappings that a failing call changes, or that change while other threads' calls use them.
#include "habit.h"
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

static void say(const char *name, long answer) {
    printf("%s %ld %s\n", name, answer, answer < 0 ? strerror(errno) : "");
}

static int wrong_in(const unsigned char *memory, size_t bytes, int value) {
    int wrong = 0;
    for (size_t i = 0; i < bytes; i += 512) wrong += memory[i] != value;
    return wrong;
}

// The kernel unmaps memory for a new mapping, and then cannot make the mapping.
static int fails(void) {
    unsigned char *memory = map(16 * MIB), is_there;
    int no_file = socket(AF_INET, SOCK_DGRAM, 0);
    memset(memory, 7, 16 * MIB);
    grow();
    send_out(memory, 12 * MIB);
    void *made = mmap(memory + 4 * MIB, 10 * MIB, PROT_READ, MAP_PRIVATE | MAP_FIXED, no_file, 0);
    say("map", made == MAP_FAILED ? -1 : 0);
    int is_hole = mincore(memory + 4 * MIB, PAGE, &is_there) < 0;
    printf("%d wrong\n", wrong_in(memory, 4 * MIB, 7) + wrong_in(memory + 14 * MIB, 2 * MIB, 7));
    if (!is_hole) printf("%d wrong\n", wrong_in(memory, 16 * MIB, 7));
    unsigned char *more = map(40 * MIB);
    memset(more, 5, 40 * MIB);
    printf("%d wrong\n", wrong_in(more, 40 * MIB, 5));
    made = mmap(memory + 4 * MIB, 10 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    printf("%d, %d wrong\n", made == memory + 4 * MIB, wrong_in(made, 10 * MIB, 0));
    return 0;
}

// The program has set no guards in this memory.
enum { GUARD_REMOVE = 103 };
static int guards(void) {
    unsigned char *memory = map(16 * MIB);
    struct iovec all = { memory, 16 * MIB };
    memset(memory, 7, 16 * MIB);
    grow();
    for (int turn = 0; turn < 2; turn++) {
        send_out(memory, 16 * MIB);
        if (turn == 0)
            madvise(memory, 16 * MIB, GUARD_REMOVE);
        else
            syscall(SYS_process_madvise, syscall(SYS_pidfd_open, getpid(), 0L), &all, 1L, (long)GUARD_REMOVE, 0L);
        printf("%d wrong\n", wrong_in(memory, 16 * MIB, 7));
    }
    return 0;
}

// Buffers of calls that wait.
enum { WAITING = 5 };
static int wires[WAITING][2];
static unsigned char *buffers[WAITING];
static long answers[WAITING];
static void *waits(void *number) {
    long at = (long)number;
    answers[at] = read(wires[at][0], buffers[at], 64 << 10);
    if (answers[at] < 0) answers[at] = -errno;
    return NULL;
}
static int meanwhile(void) {
    pthread_t threads[WAITING];
    unsigned char text[100], *elsewhere = map(4 * MIB);
    grow();
    end_after(30);
    for (long i = 0; i < WAITING; i++) {
        buffers[i] = map(MIB);
        memset(buffers[i], 7, MIB);
        if (pipe(wires[i])) return 2;
        send_out(buffers[i], MIB);
        pthread_create(&threads[i], NULL, waits, (void *)i);
    }
    usleep(200000);
    say("unmap", munmap(buffers[0], MIB));
    say("drop", madvise(buffers[1], MIB, MADV_DONTNEED));
    say("protect", mprotect(buffers[2], MIB, PROT_NONE));
    unsigned char *moved = mremap(buffers[3], MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, elsewhere);
    const int plain = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    void *over = mmap(buffers[4], MIB, PROT_READ | PROT_WRITE, plain, -1, 0);
    printf("%d %d\n", moved == elsewhere, over == buffers[4]);
    memset(text, 9, sizeof text);
    for (int i = 0; i < WAITING; i++)
        if (write(wires[i][1], text, sizeof text) != sizeof text) return 2;
    for (int i = 0; i < WAITING; i++) {
        pthread_join(threads[i], NULL);
        printf("%d: %ld\n", i, answers[i]);
    }
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 1; i < WAITING; i += 3) printf("%d %d\n", buffers[i][99], buffers[i][100]);
        printf("%d wrong\n", wrong_in(moved, MIB, 7));
        for (int i = 1; i < WAITING; i += 3) send_out(buffers[i], MIB);
        send_out(moved, 2 * MIB);
    }
    return 0;
}

// A program that serves its own faults copies from absent memory.
static int own_faults(void) {
    unsigned char *from = map(MIB), *to = map(MIB);
    struct uffdio_api api = { .api = UFFD_API };
    grow();
    end_after(20);
    // Serves only faults of the program's own code.
    int file = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | 1L);
    if (file < 0 || ioctl(file, UFFDIO_API, &api)) return 0;
    struct uffdio_register given = { .range = { (long)to, MIB }, .mode = UFFDIO_REGISTER_MODE_MISSING };
    say("register", ioctl(file, UFFDIO_REGISTER, &given));
    memset(from, 9, MIB);
    send_out(from, MIB);
    struct uffdio_copy copy = { .dst = (long)to, .src = (long)from, .len = MIB };
    say("copy", ioctl(file, UFFDIO_COPY, &copy));
    printf("%lld bytes, %d wrong\n", copy.copy, wrong_in(to, copy.copy > 0 ? copy.copy : 0, 9));
    return 0;
}

// Memory that lies beside the stacks of threads leaves all the same.
enum { THREADS = 24 };
static void *stays(void *none) {
    pause();
    return none;
}
static int beside_threads(void) {
    unsigned char *beside[THREADS];
    pthread_t thread;
    int there = 0;
    grow();
    for (int i = 0; i < THREADS; i++) {
        beside[i] = map(MIB);
        memset(beside[i], 7, MIB);
        if (pthread_create(&thread, NULL, stays, NULL)) return 2;
    }
    usleep(100000);
    for (int i = 0; i < THREADS; i++) there += !send_out(beside[i], MIB);
    // Without uzswap no page leaves.
    printf("%d stay\n", getenv("UZSWAP_TREE") ? there : 0);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "fails", fails }, { "guards", guards }, { "meanwhile", meanwhile },
        { "own_faults", own_faults }, { "beside_threads", beside_threads },
    };
    return choose(all, sizeof all / sizeof *all, arguments > 1 ? argument[1] : "");
}

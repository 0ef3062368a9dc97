// Calls that use more memory than their arguments show, or more than uzswap pins at a time.
#include "habit.h"
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/mempolicy.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>

static void say(const char *name, long answer) {
    printf("%s %ld %s\n", name, answer, answer < 0 ? strerror(errno) : "");
}

// A list of structures. Beyond the first few, their fields point to absent memory.
struct waiter { unsigned long value, word; unsigned flags, reserved; };
enum { WAITERS = 30, FUTEX_WAITV = 449, FUTEX_REQUEUE_LIST = 456, U32_PRIVATE = 0x82, U32 = 2 };
static int waits_for_many(void) {
    unsigned char *memory = map(32 * MIB);
    struct waiter all[WAITERS];
    struct timespec soon;
    memset(memory, 0, 32 * MIB);
    grow();
    // The value of one waiter differs from its word, so the call does not wait.
    for (int i = 0; i < WAITERS; i++)
        all[i] = (struct waiter){ i == 28, (long)memory + (WAITERS - i) * MIB, U32_PRIVATE, 0 };
    send_out(memory, 32 * MIB);
    say("one differs", syscall(FUTEX_WAITV, all, WAITERS, 0, NULL, 0));
    all[28].value = 0;
    clock_gettime(CLOCK_MONOTONIC, &soon);
    send_out(memory, 32 * MIB);
    say("none differs", syscall(FUTEX_WAITV, all, WAITERS, 0, &soon, CLOCK_MONOTONIC));
    all[0].flags = all[1].flags = U32;
    send_out(memory, 32 * MIB);
    say("moved", syscall(FUTEX_REQUEUE_LIST, all, 0, 1, 1));
    return 0;
}

// A socket option whose value points to a filter.
static int filters(void) {
    struct sock_filter *code = (void *)map(MIB);
    struct sock_fprog *given = (void *)map(MIB), filter = { 4096, code };
    int socket_of = socket(AF_INET, SOCK_DGRAM, 0);
    grow();
    for (int i = 0; i < 4096; i++) code[i] = (struct sock_filter){ i == 4095 ? 6 : 0, 0, 0, 0xffff };
    *given = filter;
    for (int turn = 0; turn < 2; turn++) {
        send_out(code, MIB);
        send_out(given, MIB);
        say("filter", setsockopt(socket_of, SOL_SOCKET, SO_ATTACH_FILTER, turn ? given : &filter, sizeof filter));
    }
    return 0;
}

// Asks for the NUMA node of an absent page.
static int nodes(void) {
    unsigned char *memory = map(MIB);
    int node = -1;
    memset(memory, 5, MIB);
    grow();
    send_out(memory, MIB);
    say("node", syscall(SYS_get_mempolicy, &node, NULL, 0, memory + 3 * PAGE, MPOL_F_NODE | MPOL_F_ADDR));
    printf("%d, %d\n", node >= 0, memory[3 * PAGE]);
    return 0;
}

// Receives many messages by one call, with room for 10 MiB. None may be lost.
enum { MESSAGES = 160, ROOM = 64 << 10, TEXT = 1000 };
static int many_messages(void) {
    static struct mmsghdr list[MESSAGES];
    static struct iovec parts[MESSAGES];
    int ends[2], wrong = 0, seen = 0, status;
    unsigned char *memory = map(MESSAGES * ROOM);
    socketpair(AF_UNIX, SOCK_DGRAM, 0, ends);
    for (int i = 0; i < MESSAGES; i++) {
        parts[i] = (struct iovec){ memory + i * ROOM, ROOM };
        list[i].msg_hdr = (struct msghdr){ .msg_iov = &parts[i], .msg_iovlen = 1 };
    }
    grow();
    end_after(30);
    pid_t child = fork();
    if (!child) {
        unsigned char text[TEXT];
        for (int i = 0; i < MESSAGES; i++) {
            memset(text, i, TEXT);
            if (send(ends[1], text, TEXT, 0) != TEXT) _exit(1);
        }
        _exit(0);
    }
    memset(memory, 255, MESSAGES * ROOM);
    send_out(memory, MESSAGES * ROOM);
    while (seen < MESSAGES) {
        int count = recvmmsg(ends[0], list, MESSAGES - seen, seen ? MSG_WAITFORONE : 0, NULL);
        if (count <= 0) return 2;
        for (int i = 0; i < count * TEXT; i++)
            wrong += memory[i / TEXT * ROOM + i % TEXT] != (unsigned char)(seen + i / TEXT);
        seen += count;
    }
    waitpid(child, &status, 0);
    printf("%d received, %d wrong\n", seen, wrong);
    memset(memory, 3, MESSAGES * ROOM);
    send_out(memory, MESSAGES * ROOM);
    if (!(child = fork())) {
        for (int i = 0; i < MESSAGES; i++)
            if (recv(ends[0], memory, ROOM, 0) != ROOM || memory[0] != 3) _exit(1);
        _exit(0);
    }
    printf("%d sent\n", sendmmsg(ends[1], list, MESSAGES, 0));
    waitpid(child, &status, 0);
    printf("%d\n", status);
    return 0;
}

// Calls on streams that wait until all of 10 MiB is moved, from or to memory that is paged out.
enum { LONG = 10 * MIB };
static unsigned char *data;
static void connect_by_network(int *ends) {
    struct sockaddr_in name = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t bytes = sizeof name;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (void *)&name, bytes) || listen(listener, 1)) exit(2);
    getsockname(listener, (void *)&name, &bytes);
    ends[0] = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(ends[0], (void *)&name, bytes)) exit(2);
    ends[1] = accept(listener, NULL, NULL);
    close(listener);
}
static long differ(unsigned char *at, long bytes) {
    long wrong = 0;
    for (long i = 0; i < bytes; i++) wrong += at[i] != i % 251;
    return wrong;
}
static long move_all(int file, int is_write) {
    long done = 0, part;
    while (done < LONG && (part = is_write ? write(file, data + done, LONG - done)
                                           : read(file, data + done, LONG - done)) > 0) done += part;
    return done;
}
static int streams(void) {
    static const char *const names[] = { "send", "sendmsg", "writev", "writev to a pipe", "recv", "recvmsg" };
    data = map(LONG);
    grow();
    end_after(110);
    for (int turn = 0; turn < 8; turn++) {
        int kind = turn % 6, ends[2], status, is_read = kind >= 4;
        if (kind == 3 && pipe(ends)) return 2;
        if (kind == 3) ends[0] ^= ends[1], ends[1] ^= ends[0], ends[0] ^= ends[1];
        else if (turn < 6) socketpair(AF_UNIX, SOCK_STREAM, 0, ends);
        else connect_by_network(ends);
        struct iovec parts[] = { { data, 7 * MIB }, { data, 0 }, { data + 7 * MIB, 1000 },
                                 { data + 7 * MIB + 1000, LONG - 7 * MIB - 1000 } };
        struct msghdr message = { .msg_iov = parts, .msg_iovlen = 4 };
        for (long i = 0; i < LONG; i++) data[i] = i % 251;
        pid_t child = fork();
        if (!child) {
            close(ends[0]);
            if (!is_read) memset(data, 255, LONG);
            _exit(move_all(ends[1], is_read) != LONG || differ(data, LONG));
        }
        if (is_read) memset(data, 255, LONG);
        send_out(data, LONG);
        long bytes = kind == 0 ? send(ends[0], data, LONG, 0)
            : kind == 1 ? sendmsg(ends[0], &message, 0)
            : kind < 4 ? writev(ends[0], parts, 4)
            : kind == 4 ? recv(ends[0], data, LONG, MSG_WAITALL)
                        : recvmsg(ends[0], &message, MSG_WAITALL);
        close(ends[0]);
        waitpid(child, &status, 0);
        printf("%s %ld bytes, %ld wrong, %d\n", names[kind], bytes, differ(data, LONG), status);
        close(ends[1]);
    }
    return 0;
}

// Long copies whose source and target are both out.
static int copies(void) {
    unsigned char *from = map(LONG), *to = map(LONG);
    for (long i = 0; i < LONG; i++) from[i] = i % 251;
    grow();
    for (int turn = 0; turn < 2; turn++) {
        memset(to, 255, LONG);
        struct iovec one = { to, LONG }, parts[] = { { from, 9 * MIB + 1 }, { from, 0 },
                                                     { from + 9 * MIB + 1, LONG - 9 * MIB - 1 } };
        send_out(from, LONG);
        send_out(to, LONG);
        long bytes = turn ? process_vm_writev(getpid(), parts, 3, &one, 1, 0)
                          : process_vm_readv(getpid(), &one, 1, parts, 3, 0);
        printf("%ld bytes, %ld wrong\n", bytes, differ(to, LONG));
    }
    return 0;
}

// Reads devices into a long absent buffer.
static int devices(void) {
    unsigned char *to = map(LONG);
    int zero = open("/dev/zero", O_RDONLY), random = open("/dev/urandom", O_RDONLY);
    grow();
    for (int turn = 0; turn < 5; turn++) {
        struct iovec parts[] = { { to, MIB }, { to + MIB, LONG - MIB } };
        long other = 0;
        memset(to, 255, LONG);
        send_out(to, LONG);
        long bytes = turn == 0 ? read(zero, to, LONG)
            : turn == 1 ? pread(zero, to, LONG, 0)
            : turn == 2 ? readv(zero, parts, 2)
            : turn == 3 ? read(random, to, LONG)
                        : syscall(SYS_getrandom, to, (long)LONG, 0L);
        for (long i = 0; i < LONG; i += 8) other += !memcmp(to + i, "\377\377\377\377\377\377\377\377", 8);
        printf("%ld bytes, %ld left\n", bytes, other);
    }
    return 0;
}

// Gives a pipe as much memory as it has room for, page by page (`vmsplice`).
static int pipes(void) {
    unsigned char *memory = map(2 * MIB), seen[64];
    char name[] = "pipe.XXXXXX";
    int ends[2];
    if (close(mkstemp(name)) || unlink(name) || mkfifo(name, 0600) || pipe(ends)) return 2;
    int named = open(name, O_RDWR);
    unlink(name);
    memset(memory, 7, 2 * MIB);
    grow();
    end_after(20);
    send_out(memory, 2 * MIB);
    struct iovec whole = { memory + 100, MIB }, two[] = { { memory, 5000 }, { memory + MIB, 100 } };
    say("whole", vmsplice(ends[1], &whole, 1, 0));
    say("full", vmsplice(ends[1], &whole, 1, SPLICE_F_NONBLOCK));
    say("two", vmsplice(named, two, 2, SPLICE_F_NONBLOCK));
    say("rest", vmsplice(named, &whole, 1, SPLICE_F_NONBLOCK));
    send_out(memory, 2 * MIB);
    say("out", vmsplice(ends[0], &(struct iovec){ memory + MIB, 9000 }, 1, 0));
    printf("%d %d\n", memory[MIB], memory[MIB + 8999]);
    say("bad", vmsplice(ends[1], &(struct iovec){ (void *)16, 5 }, 1, 0));
    say("read", read(named, seen, sizeof seen));
    printf("%d\n", seen[63]);
    return 0;
}

// Lengths beyond all memory are refused, and nothing is moved.
static int beyond(void) {
    unsigned char *memory = map(LONG);
    char name[] = "file.XXXXXX";
    int file = mkstemp(name), ends[2];
    size_t lengths[] = { -1, 1UL << 63, 1UL << 47, -1UL - (size_t)memory };
    unlink(name);
    memset(memory, 7, LONG);
    if (write(file, memory, LONG) != LONG || pipe(ends)) return 2;
    grow();
    memset(memory, 9, LONG);
    fcntl(ends[1], F_SETFL, O_NONBLOCK);
    for (int i = 0; i < 4; i++) {
        lseek(file, 0, SEEK_SET);
        say("read", read(file, memory, lengths[i]));
        say("pread", pread(file, memory, lengths[i], 0));
        say("write", write(file, memory, lengths[i]));
        say("to a pipe", write(ends[1], memory, lengths[i]));
        printf("%d at %ld of %ld\n", memory[MIB], (long)lseek(file, 0, SEEK_CUR), (long)lseek(file, 0, SEEK_END));
    }
    return 0;
}

// Threads that read one open file get whole blocks.
enum { BLOCK_BYTES = 8 * MIB, NUMBERS = 12 * BLOCK_BYTES / 4 };
static int numbered, torn, by_list;
static void *reads(void *to) {
    unsigned *block = to;
    struct iovec parts[] = { { to, 5 * MIB }, { to + 5 * MIB, BLOCK_BYTES - 5 * MIB } };
    for (;;) {
        long bytes = by_list ? readv(numbered, parts, 2) : read(numbered, to, BLOCK_BYTES);
        if (bytes <= 0) return NULL;
        for (long i = 1; i < bytes / 4; i++)
            if (block[i] != block[i - 1] + 1) {
                __sync_fetch_and_add(&torn, 1);
                break;
            }
    }
}
static int positions(void) {
    char name[] = "numbers.XXXXXX";
    unsigned *numbers = (void *)map(MIB), next = 0;
    unsigned char *blocks[2] = { map(BLOCK_BYTES), map(BLOCK_BYTES) };
    pthread_t other;
    numbered = mkstemp(name);
    unlink(name);
    while (next < NUMBERS - 1000) {
        for (int i = 0; i < MIB / 4; i++) numbers[i] = next++;
        if (write(numbered, numbers, MIB) != MIB) return 2;
    }
    grow();
    for (by_list = 0; by_list < 2; by_list++) {
        lseek(numbered, 0, SEEK_SET);
        pthread_create(&other, NULL, reads, blocks[1]);
        reads(blocks[0]);
        pthread_join(other, NULL);
        printf("%d torn, at %ld\n", torn, (long)lseek(numbered, 0, SEEK_CUR));
    }
    return 0;
}

// A pipe of packets: the kernel makes a packet of each page of a call's bytes, across its buffers.
static void count_packets(int from) {
    static unsigned char packet[2 * PAGE];
    unsigned long packets = 0, bytes = 0, sum = 0;
    for (long read_bytes; (read_bytes = read(from, packet, sizeof packet)) > 0; packets++) {
        for (long i = 0; i < read_bytes; i++) sum = sum * 31 + packet[i];
        bytes += read_bytes;
    }
    printf("%lu packets, %lu bytes, %lu\n", packets, bytes, sum);
    fflush(stdout);
}
static int packets(void) {
    enum { COUNT = 1024 };
    static const struct { size_t bytes, apart; } lists[] = { { 5000, 5000 }, { 4, PAGE }, { 3, 2 * PAGE - 1 } };
    unsigned char *all = map(COUNT * 2 * PAGE);
    struct iovec list[COUNT];
    end_after(100);
    for (int i = 0; i < COUNT * 2 * PAGE; i++) all[i] = i * 7 / 3;
    grow();
    for (int turn = 0; turn < 4; turn++) {
        int ends[2];
        if (pipe2(ends, O_DIRECT)) return 2;
        pid_t child = fork();
        if (!child) {
            close(ends[1]);
            count_packets(ends[0]);
            _exit(0);
        }
        close(ends[0]);
        for (int i = 0; i < COUNT; i++)
            list[i] = (struct iovec){ all + i * lists[turn % 3].apart, lists[turn % 3].bytes };
        // A list with a buffer that cannot be read.
        if (turn == 3) list[1000].iov_base = (void *)16;
        send_out(all, COUNT * 2 * PAGE);
        long written = writev(ends[1], list, COUNT);
        printf("%ld\n", written);
        fflush(stdout);
        close(ends[1]);
        waitpid(child, NULL, 0);
    }
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "packets", packets },
        { "pipes", pipes }, { "beyond", beyond }, { "positions", positions },
        { "waits_for_many", waits_for_many }, { "filters", filters }, { "nodes", nodes },
        { "many_messages", many_messages }, { "streams", streams }, { "copies", copies },
        { "devices", devices },
    };
    return arguments > 1 ? choose(all, sizeof all / sizeof *all, argument[1]) : 99;
}

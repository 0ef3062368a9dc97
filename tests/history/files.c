/* Files, pipes and sockets: reads, writes, and descriptor numbers. */
#include "history.h"
#include <dlfcn.h>
#include <stdio.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

struct file files[FILES];

static struct file *file_of(const struct operation *operation, int argument) {
    return &files[operation->argument[argument] % FILES];
}

static void shut(struct file *file) {
    if (file->reader >= 0) close(file->reader);
    if (file->writer >= 0 && file->writer != file->reader) close(file->writer);
    file->reader = file->writer = -1;
}

/* open FILE NAME FLAGS: opens a file with content. */
static void op_open(const struct operation *operation) {
    struct file *file = file_of(operation, 0);
    char path[32];
    shut(file);
    path_of(path, "f", operation->argument[1]);
    int new = open(path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (new >= 0) {
        static char content[24 * PAGE] __attribute__((aligned(4096)));
        fill(content, 24, operation->argument[1] + 100);
        (void)!write(new, content, sizeof content);
        close(new);
    }
    file->reader = file->writer = open(path, operation->argument[2], 0600);
    say(operation, file->reader < 0 ? -1 : 0, 0);
}

/* close FILE */
static void op_close(const struct operation *operation) {
    struct file *file = file_of(operation, 0);
    if (file->reader < 0) return;
    say(operation, close(file->reader), 0);
    if (file->writer != file->reader) close(file->writer);
    file->reader = file->writer = -1;
}

/* pipe FILE, pair FILE KIND: make a non-blocking pipe or pair of sockets. */
static void op_pipe(const struct operation *operation) {
    struct file *file = file_of(operation, 0);
    int ends[2] = {-1, -1};
    shut(file);
    say(operation, pipe2(ends, O_NONBLOCK | O_CLOEXEC), 0);
    *file = (struct file){ends[0], ends[1]};
}
static void op_pair(const struct operation *operation) {
    static const int kinds[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
    struct file *file = file_of(operation, 0);
    int ends[2] = {-1, -1};
    shut(file);
    say(operation, socketpair(AF_UNIX, kinds[operation->argument[1] % 3] | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    *file = (struct file){ends[0], ends[1]};
}

/* Cuts memory into three parts, the middle one first. */
static void cut(struct iovec *vector, char *at, long bytes) {
    long third = bytes / 3;
    vector[0] = (struct iovec){at + third, third};
    vector[1] = (struct iovec){at, third};
    vector[2] = (struct iovec){at + 2 * third, bytes - 2 * third};
}

/* write HOW FILE SLOT OFFSET BYTES PLACE, read likewise. HOW selects the call. The memory may have holes. */
static void op_write(const struct operation *operation) {
    struct slot *slot = slot_of(operation, 2);
    struct iovec vector[3];
    int file = file_of(operation, 1)->writer;
    long bytes = operation->argument[4], place = operation->argument[5], answer;
    char *at = bytes_of(slot, operation->argument[3], &bytes);
    struct msghdr message = {.msg_iov = vector, .msg_iovlen = 3};
    struct mmsghdr messages[2] = {{.msg_hdr = message}, {.msg_hdr = message}};
    if (!slot->at || file < 0) return;
    cut(vector, at, bytes);
    switch (operation->argument[0]) {
    case 0: answer = write(file, at, bytes); break;
    case 1: answer = writev(file, vector, 3); break;
    case 2: answer = pwrite(file, at, bytes, place); break;
    case 3: answer = pwritev(file, vector, 3, place); break;
    case 4: answer = pwritev2(file, vector, 3, place, RWF_APPEND); break;
    case 5: answer = send(file, at, bytes, MSG_NOSIGNAL); break;
    case 6: answer = sendmsg(file, &message, MSG_NOSIGNAL); break;
    case 7: answer = sendmmsg(file, messages, 2, MSG_NOSIGNAL); break;
    case 8: answer = vmsplice(file, vector, 3, SPLICE_F_NONBLOCK); break;
    default: answer = syscall(SYS_write, file, at, bytes);
    }
    say(operation, answer, 0);
}

static void op_read(const struct operation *operation) {
    struct slot *slot = slot_of(operation, 2);
    struct iovec vector[3];
    int file = file_of(operation, 1)->reader;
    long bytes = operation->argument[4], place = operation->argument[5], answer;
    char *at = bytes_of(slot, operation->argument[3], &bytes);
    struct msghdr message = {.msg_iov = vector, .msg_iovlen = 3};
    struct mmsghdr messages[2] = {{.msg_hdr = message}, {.msg_hdr = message}};
    if (!slot->at || file < 0) return;
    cut(vector, at, bytes);
    switch (operation->argument[0]) {
    case 0: answer = read(file, at, bytes); break;
    case 1: answer = readv(file, vector, 3); break;
    case 2: answer = pread(file, at, bytes, place); break;
    case 3: answer = preadv(file, vector, 3, place); break;
    case 4: answer = preadv2(file, vector, 3, place, 0); break;
    case 5: answer = recv(file, at, bytes, 0); break;
    case 6: answer = recvmsg(file, &message, 0); break;
    case 7: answer = recvmmsg(file, messages, 2, MSG_DONTWAIT, NULL); break;
    case 8: answer = recv(file, at, bytes, MSG_PEEK); break;
    default: answer = syscall(SYS_read, file, at, bytes);
    }
    say(operation, answer, sum_of_slot(slot));
}

/* seek FILE PLACE, resize FILE BYTES */
static void op_seek(const struct operation *operation) {
    int file = file_of(operation, 0)->reader;
    if (file >= 0) say(operation, lseek(file, operation->argument[1], SEEK_SET), 0);
}
static void op_resize(const struct operation *operation) {
    int file = file_of(operation, 0)->writer;
    if (file >= 0) say(operation, ftruncate(file, operation->argument[1]), 0);
}

/* content FILE: the sum of a file's bytes, or of the bytes in a pipe or socket. */
static void op_content(const struct operation *operation) {
    static char content[PAGE];
    int file = file_of(operation, 0)->reader;
    struct stat status;
    uint64_t sum = 1;
    long bytes, whole = 0;
    if (file < 0 || fstat(file, &status)) return;
    int is_file = S_ISREG(status.st_mode);
    while (whole < 64 * MIB && (bytes = is_file ? pread(file, content, PAGE, whole) : read(file, content, PAGE)) > 0)
        sum = mix(sum, sum_of(content, bytes)), whole += bytes;
    say(operation, whole, sum);
}

/* copy HOW FROM TO BYTES SLOT: copies between files. The slot has the file offset. */
static void op_copy(const struct operation *operation) {
    int from = file_of(operation, 1)->reader, to = file_of(operation, 2)->writer;
    struct slot *slot = slot_of(operation, 4);
    uint64_t value;
    if (from < 0 || to < 0 || from == to || !slot->at) return;
    off_t *place = (off_t *)(slot->at + PAGE - sizeof *place);
    if (!peek(place, &value)) poke(place, 100), page_out(slot->at, PAGE);
    long answer;
    switch (operation->argument[0]) {
    case 0: answer = sendfile(to, from, place, operation->argument[3]); break;
    case 1: answer = copy_file_range(from, place, to, NULL, operation->argument[3], 0); break;
    case 2: answer = splice(from, place, to, NULL, operation->argument[3], SPLICE_F_NONBLOCK); break;
    default: answer = tee(from, to, operation->argument[3], SPLICE_F_NONBLOCK);
    }
    say(operation, answer, peek(place, &value) ? 1 : value + 2);
}

/* append HOW KIB BLOCKS: two processes append blocks to a file at the same time. No block may be torn. */
static void op_append(const struct operation *operation) {
    long bytes = operation->argument[1] << 10, blocks = operation->argument[2], torn = 0, whole = 0;
    uint32_t *go = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    char path[] = "appended";
    int status;
    unlink(path);
    close(open(path, O_WRONLY | O_CREAT, 0600));
    for (int child = 0; child < 2; child++) {
        if (fork()) continue;
        char *block = map(bytes);
        memset(block, 'a' + child, bytes);
        int file = open(path, O_WRONLY | O_APPEND);
        __atomic_fetch_add(go, 1, __ATOMIC_SEQ_CST);
        while (__atomic_load_n(go, __ATOMIC_SEQ_CST) < 2) usleep(100);
        struct iovec vector[3];
        cut(vector, block, bytes);
        for (long i = 0; i < blocks; i++)
            if ((operation->argument[0] ? writev(file, vector, 3) : write(file, block, bytes)) != bytes) _exit(1);
        _exit(0);
    }
    for (int child = 0; child < 2; child++)
        if (wait(&status) < 0 || status) torn += 1000;
    int file = open(path, O_RDONLY);
    for (char *block = map(bytes); block && read(file, block, bytes) == bytes; whole++) torn += memcmp(block, block + 1, bytes - 1) != 0;
    close(file);
    unlink(path);
    munmap(go, PAGE);
    say(operation, whole, torn + 1);
}

/* close-all HOW: closes descriptors from 3 on. If it closes one by one, it counts those that were open. */
static void op_close_all(const struct operation *operation) {
    long closed = 0;
    switch (operation->argument[0]) {
    /* The kernel reads 32 bits of the bound. */
    case 0: closed = syscall(SYS_close_range, 3L, ~0L, 0L); break;
    case 1: closefrom(3); break;
    default:
        for (int file = 3; file < 1024; file++) closed += close(file) == 0;
    }
    for (int at = 0; at < FILES; at++) files[at].reader = files[at].writer = -1;
    say(operation, closed, 0);
}

/* reopen TURNS: closes all descriptors, opens a file, and reads that file's bytes. */
static void op_reopen(const struct operation *operation) {
    char content[64];
    long other = 0;
    for (int at = 0; at < FILES; at++) shut(&files[at]);
    int made = open("reopened", O_WRONLY | O_CREAT | O_TRUNC, 0600);
    (void)!write(made, "what it says", 12);
    close(made);
    for (long turn = 0; turn < operation->argument[0]; turn++) {
        syscall(SYS_close_range, 3, ~0U, 0);
        int file = open("reopened", O_RDONLY);
        usleep(turn % 4 ? 0 : 1500);
        long bytes = read(file, content, sizeof content);
        other += bytes != 12 || memcmp(content, "what it says", 12);
        other += close(file) != 0;
    }
    say(operation, other, 0);
}

/* lowest: the number of a new descriptor. */
static void op_lowest(const struct operation *operation) {
    int file = dup(0);
    say(operation, file, 0);
    if (file >= 0) close(file);
}

/* number FILE TO: moves a descriptor. */
static void op_number(const struct operation *operation) {
    struct file *file = file_of(operation, 0);
    int to = operation->argument[1];
    if (file->reader < 0) return;
    for (int at = 0; at < FILES; at++)
        if (files[at].reader == to || files[at].writer == to) return;
    long answer = dup2(file->reader, to);
    say(operation, answer == to ? 0 : answer, 0);
    if (answer != to) return;
    if (file->writer == file->reader) file->writer = to;
    close(file->reader);
    file->reader = to;
}

/* library SLOT OFFSET: dlopen of a library that contains a system call instruction. */
static void op_library(const struct operation *operation) {
    static long (*call)(long, long, long, long);
    struct slot *slot = slot_of(operation, 0);
    if (!call) {
        void *library = dlopen("./library.so", RTLD_NOW);
        if (!library || !(call = (long (*)(long, long, long, long))dlsym(library, "call"))) {
            say_text(operation, "there is no library");
            return;
        }
    }
    if (!slot->at || files[0].reader < 0) return;
    long bytes = 2 * PAGE;
    char *at = bytes_of(slot, operation->argument[1], &bytes);
    page_out(slot->at, slot->pages * PAGE);
    long answer = call(SYS_pread64, files[0].reader, (long)at, bytes);
    errno = answer < 0 ? -answer : 0;
    say(operation, answer < 0 ? -1 : answer, sum_of_slot(slot));
}

const struct action file_actions[] = {
    {"open", op_open}, {"close", op_close}, {"pipe", op_pipe}, {"pair", op_pair}, {"write", op_write}, {"read", op_read},
    {"seek", op_seek}, {"resize", op_resize}, {"content", op_content}, {"copy", op_copy}, {"append", op_append},
    {"close-all", op_close_all}, {"reopen", op_reopen}, {"lowest", op_lowest}, {"number", op_number}, {"library", op_library},
    {NULL, NULL}};

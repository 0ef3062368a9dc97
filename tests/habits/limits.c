// Limits that a program sets itself. They hold for the program's files and descriptors, but not for
// uzswap's.
#include "habit.h"
#include <sys/resource.h>

static unsigned long *noise;
enum { BYTES = 40 * MIB, COUNT = BYTES / 8 };

// Fills memory that does not compress, so that a part of it goes to the disk. Returns its sum.
static unsigned long sum(int is_filled) {
    unsigned long state = 88172645463325252, sum = 0;
    for (int i = 0; i < COUNT; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        if (is_filled) noise[i] = state;
        sum += noise[i] * (i | 1);
    }
    return sum;
}

static void print_limit(const char *name, int resource) {
    struct rlimit limit;
    getrlimit(resource, &limit);
    printf("%s %ld %ld\n", name, (long)limit.rlim_cur, (long)limit.rlim_max);
}

// A file of the program's own ends at the limit.
static void print_file(void) {
    static char block[8192];
    char name[] = "limited.XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    long first = write(file, block, sizeof block), second = write(file, block, sizeof block);
    printf("file %ld %ld %d\n", first, second, second < 0 && errno == EFBIG);
    int cut = ftruncate(file, 100000);
    printf("length %d %d\n", cut, errno == EFBIG);
    close(file);
}

static int of_files(struct rlimit limit) {
    end_after(100);
    signal(SIGXFSZ, SIG_IGN);
    noise = (void *)map(BYTES);
    grow();
    printf("%d\n", setrlimit(RLIMIT_FSIZE, &limit));
    unsigned long before = sum(1);
    send_out(noise, BYTES);
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        int is_same = sum(0) == before;
        sum(1);
        send_out(noise, BYTES);
        _exit(is_same && sum(0) == before ? 0 : 1);
    }
    printf("child %d, ", child > 0 && waitpid(child, &status, 0) == child);
    printf("%d, same %d\n", status, sum(0) == before);
    print_file();
    print_limit("files", RLIMIT_FSIZE);
    return 0;
}
static int soft_files(void) { return of_files((struct rlimit){ 4096, RLIM_INFINITY }); }
static int hard_files(void) { return of_files((struct rlimit){ 4096, 8192 }); }

// A hard limit cannot be raised again, and programs that are started inherit it.
static int stays(void) {
    struct rlimit few = { 20, 30 }, more = { 40, 40 }, old = { 0, 0 }, none = { 8192, 8192 };
    grow();
    printf("%d\n", setrlimit(RLIMIT_NOFILE, &few));
    print_limit("descriptors", RLIMIT_NOFILE);
    int raised = setrlimit(RLIMIT_NOFILE, &more);
    printf("%d %d\n", raised, errno == EPERM);
    few.rlim_cur = 31;
    raised = setrlimit(RLIMIT_NOFILE, &few);
    printf("%d %d\n", raised, errno == EINVAL);
    few.rlim_cur = 25;
    printf("%d", prlimit(0, RLIMIT_NOFILE, &few, &old));
    printf(" %d %d\n", (int)old.rlim_cur, (int)old.rlim_max);
    int opened = 0;
    while (open("/dev/null", O_RDONLY) >= 0) opened++;
    printf("%d\n", opened < 25 && errno == EMFILE);
    for (int i = 3; i < 25; i++) close(i);
    printf("%d\n", setrlimit(RLIMIT_FSIZE, &none));
    fflush(stdout);
    for (int way = 0; way < 2; way++) {
        pid_t child = way ? fork() : vfork();
        if (!child) {
            execl("/bin/sh", "sh", "-c", "ulimit -S -n; ulimit -H -n; ulimit -H -f", NULL);
            _exit(1);
        }
        printf("%d\n", child > 0 && wait(NULL) == child);
        fflush(stdout);
    }
    print_limit("files", RLIMIT_FSIZE);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "soft_files", soft_files }, { "hard_files", hard_files }, { "stays", stays },
    };
    return choose(all, sizeof all / sizeof *all, argument[arguments - 1]);
}

// A program counts its own threads and descriptors.
#include "habit.h"
#include <dirent.h>

// The number behind a label, or the number of a field.
static int number_in(const char *path, const char *label, int field) {
    char text[4096];
    FILE *file = fopen(path, "r");
    size_t bytes = file ? fread(text, 1, sizeof text - 1, file) : 0;
    text[bytes] = 0;
    if (file) fclose(file);
    char *at = label ? strstr(text, label) : strrchr(text, ')');
    if (!at) return -1;
    if (label) return atoi(at + strlen(label));
    for (int i = 2; i < field && at; i++) at = strchr(at + 1, ' ');
    return at ? atoi(at) : -1;
}

static int entries_of(const char *path) {
    int count = 0;
    DIR *folder = opendir(path);
    for (struct dirent *one; (one = readdir(folder));) count += one->d_name[0] != '.';
    closedir(folder);
    return count;
}

static int gate[2];
static void *waits(void *unused) {
    char byte;
    if (read(gate[0], &byte, 1) != 1) abort();
    return unused;
}

static void print_threads(void) {
    printf("%d", number_in("/proc/self/status", "\nThreads:\t", 0));
    printf(" %d", number_in("/proc/self/stat", NULL, 20));
    printf(" %d", number_in("/proc/thread-self/stat", NULL, 20));
    printf(" %d\n", entries_of("/proc/self/task"));
    fflush(stdout);
}
static int threads(void) {
    pthread_t others[3];
    if (pipe(gate)) return 2;
    grow();
    print_threads();
    for (int i = 0; i < 3; i++) pthread_create(&others[i], NULL, waits, NULL);
    print_threads();
    pid_t child = fork();
    if (child == 0) {
        print_threads();
        free(malloc(8 * MIB));
        usleep(100000);
        print_threads();
        _exit(0);
    }
    waitpid(child, NULL, 0);
    if (write(gate[1], "all", 3) != 3) return 3;
    for (int i = 0; i < 3; i++) pthread_join(others[i], NULL);
    return 0;
}

// The rest of the text stays as it is, also where it is read again.
static int texts(void) {
    char first[4096] = "", again[4096] = "";
    grow();
    int file = open("/proc/self/stat", O_RDONLY);
    long bytes = read(file, first, sizeof first - 1), rest = read(file, again, 100);
    char *end = strrchr(first, '\n');
    printf("%d %ld\n", end && !end[1] && bytes == (long)strlen(first), rest);
    bytes = pread(file, again, sizeof again - 1, 0);
    printf("%d\n", bytes == (long)strlen(again) && strchr(again, ')') && atoi(again) == getpid());
    close(file);
    return 0;
}

static void print_descriptors(void) {
    int open_ones = 0;
    for (int i = 0; i < 2000; i++) open_ones += fcntl(i, F_GETFD) >= 0;
    printf("%d %d %d\n", open_ones, entries_of("/proc/self/fd"), entries_of("/proc/self/fdinfo"));
    fflush(stdout);
}
static int descriptors(void) {
    grow();
    print_descriptors();
    pid_t child = fork();
    if (child == 0) {
        print_descriptors();
        _exit(0);
    }
    waitpid(child, NULL, 0);
    // As daemons close all of them.
    DIR *folder = opendir("/proc/self/fd");
    int failed = 0;
    for (struct dirent *one; (one = readdir(folder));) {
        int number = atoi(one->d_name);
        if (number > 2 && number != dirfd(folder)) failed += close(number) != 0;
    }
    closedir(folder);
    printf("%d failed\n", failed);
    return 0;
}

int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "threads", threads }, { "texts", texts }, { "descriptors", descriptors },
    };
    return choose(all, sizeof all / sizeof *all, arguments > 1 ? argument[1] : "");
}

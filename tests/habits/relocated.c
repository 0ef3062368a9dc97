// A library with 6 MiB of constants that the dynamic linker relocates at the start. With -DLIBRARY
// this is the library.
#include "habit.h"
#include <dlfcn.h>

enum { COUNT = 6 * MIB / 8 };

#ifdef LIBRARY
__attribute__((visibility("hidden"))) unsigned char target[COUNT];
extern const unsigned char *const constants[COUNT];
__asm__(".section .data.rel.ro, \"aw\"\n.hidden constants\n.align 4096\nconstants:\n.set at, 0\n"
        ".rept 786432\n.quad target + at\n.set at, at + 1\n.endr\n.previous");
const unsigned char *const *find(unsigned char **first) {
    *first = target;
    return constants;
}
#else

static const unsigned char *const *constants;
static unsigned char *first;
static void *library;
static volatile int is_over;

static long wrong(void) {
    long count = 0;
    for (int i = 0; i < COUNT; i++) count += constants[i] != first + i;
    return count;
}

static void *keep_reading(void *count) {
    for (unsigned at = 1; !is_over; at = at * 1664525u + 1013904223u)
        *(long *)count += constants[at % COUNT] != first + at % COUNT;
    return NULL;
}

static int begin(void) {
    library = dlopen("./library.so", RTLD_NOW);
    if (!library) return 1;
    const unsigned char *const *(*find)(unsigned char **) = dlsym(library, "find");
    constants = find(&first);
    return 0;
}

// Constants that threads read during the take-over, that leave, and that calls and children read.
static int constant(void) {
    long by_threads[2] = { 0 };
    pthread_t threads[2];
    if (begin()) return 2;
    for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, keep_reading, &by_threads[i]);
    grow();
    long counts[4] = { 0 };
    for (int i = 0; i < 20; i++) {
        send_out((void *)constants, 6 * MIB);
        counts[0] += wrong();
    }
    is_over = 1;
    for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    send_out((void *)constants, 6 * MIB);
    int child = fork(), status = 0;
    if (child == 0) _exit(wrong() != 0);
    waitpid(child, &status, 0);
    char name[] = "constants.XXXXXX";
    int file = mkstemp(name);
    unlink(name);
    send_out((void *)constants, 6 * MIB);
    long written = write(file, constants, 6 * MIB);
    static const unsigned char *read_back[COUNT];
    long read = pread(file, read_back, 6 * MIB, 0);
    for (int i = 0; i < COUNT; i++) counts[1] += read_back[i] != first + i;
    printf("%ld %ld by threads, %ld here, %d in a child, %ld of %ld %ld in a file\n", by_threads[0],
           by_threads[1], counts[0], status, counts[1], written, read);
    return 0;
}

// Constants that a program makes writable, changes, and whose library it unloads and loads again.
static int changed(void) {
    if (begin()) return 2;
    grow();
    send_out((void *)constants, 6 * MIB);
    const unsigned char **all = (void *)constants;
    int failed = mprotect(all, 2 * MIB, PROT_READ | PROT_WRITE);
    for (int i = 0; i < 2 * MIB / 8; i += 100) all[i] = NULL;
    send_out((void *)constants, 6 * MIB);
    long changed = wrong();
    failed += mprotect(all, 2 * MIB, PROT_READ) + dlclose(library) + begin();
    grow();
    printf("%d failed, %ld changed, %ld wrong\n", failed, changed, wrong());
    return 0;
}

int main(int arguments, char **argument) {
    const char *habit = arguments > 1 ? argument[1] : "";
    return strcmp(habit, "changed") ? constant() : changed();
}
#endif

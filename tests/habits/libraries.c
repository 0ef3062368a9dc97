// Libraries with a C library of their own, which the dynamic linker does not list to others.
#include "habit.h"
#include <dlfcn.h>
#include <malloc.h>
#include <sys/stat.h>

// Writes memory that is out to a pipe, and reads it back, by the functions of a C library.
static void move(unsigned char *all, long write_some(int, const void *, size_t), long read_some(int, void *, size_t)) {
    int ends[2], failed = 0;
    if (pipe(ends)) return;
    alarm(60);
    for (int i = 0; i < 20; i++) {
        send_out(all, 8 * MIB);
        long written = write_some(ends[1], all + i * 16384, 8192);
        send_out(all, 8 * MIB);
        if (written != 8192 || read_some(ends[0], all + MIB + i * 8192, 8192) != written) failed++;
    }
    unsigned long sum = 0;
    for (int i = 0; i < 8 * MIB; i++) sum = sum * 31 + all[i];
    printf("%d failed, %lu\n", failed, sum);
}

static int of_namespace(int is_early) {
    unsigned char *all = map(8 * MIB);
    for (int i = 0; i < 8 * MIB; i++) all[i] = i / 7;
    if (!is_early) grow();
    void *library = dlmopen(LM_ID_NEWLM, "libc.so.6", RTLD_NOW);
    if (!library) return 2;
    if (is_early) grow();
    move(all, dlsym(library, "write"), dlsym(library, "read"));
    return 0;
}
static int early_namespace(void) { return of_namespace(1); }
static int late_namespace(void) { return of_namespace(0); }

// Code that the program writes as it runs, and that makes a system call itself.
static int writes_code(int is_early, int access) {
    // mov eax, 1; xor r8d, r8d; syscall; ret
    static const unsigned char code[] = { 0xb8, 1, 0, 0, 0, 0x45, 0x31, 0xc0, 0x0f, 0x05, 0xc3 };
    unsigned char *all = map(8 * MIB), *written = map(MIB);
    int ends[2];
    memset(all, 7, 8 * MIB);
    if (!is_early) grow();
    if (pipe(ends) || mprotect(written, MIB, access | PROT_READ | PROT_WRITE)) return 2;
    memcpy(written + 70000, code, sizeof code);
    if (mprotect(written, MIB, access | PROT_READ | PROT_EXEC)) return 3;
    for (int i = 0; is_early && i < 60; i++) {
        memset(map(MIB), 1, MIB);
        usleep(10000);
    }
    madvise(all, 8 * MIB, MADV_PAGEOUT);
    long (*call)(int, void *, size_t) = (void *)(written + 70000);
    printf("%ld\n", call(ends[1], all + 100000, 30000));
    return 0;
}
static int early_code(void) { return writes_code(1, 0); }
static int late_code(void) { return writes_code(0, 0); }
static int early_writable_code(void) { return writes_code(1, PROT_WRITE | PROT_EXEC); }

// Functions that uzswap looks up at their first use, while `dlerror` is to report an error.
static int use(int function) {
    void *block = NULL;
    struct stat status;
    if (function == 0) return posix_memalign(&block, 64, 100);
    if (function == 1) return !aligned_alloc(64, 128);
    if (function == 2) return !memalign(64, 100);
    if (function == 3) return fstatat(AT_FDCWD, ".", &status, 0);
    if (!fork()) _exit(0);
    return wait(NULL) < 0;
}
static int keeps_errors(void) {
    for (int function = 0; function < 5; function++) {
        void *library = dlopen("./absent.so", RTLD_NOW);
        int failed = use(function);
        printf("%d %d, ", !library && !failed, dlerror() != NULL);
    }
    grow();
    puts("");
    return 0;
}

// A library that the dynamic linker informs of other libraries (`LD_AUDIT`) writes memory of its
// own.
static int audited(void) {
    grow();
    printf("%d\n", dlopen("libm.so.6", RTLD_NOW) != NULL);
    return 0;
}

#ifdef AUDIT
static unsigned char *own;
unsigned la_version(unsigned version) { return version; }
void la_preinit(unsigned long *cookie) { own = memset(map(8 * MIB), 5, 8 * MIB), (void)cookie; }
unsigned la_objopen(void *object, long name_space, unsigned long *cookie) {
    (void)object, (void)name_space, (void)cookie;
    static int is_done;
    if (own && getenv("UZSWAP_TREE") && !send_out(own, 8 * MIB)) return 0;
    if (own && !is_done++) move(own, write, read), fflush(stdout);
    return 0;
}
#else
int main(int arguments, char **argument) {
    static const struct named all[] = {
        { "early_namespace", early_namespace }, { "late_namespace", late_namespace },
        { "audited", audited }, { "early_code", early_code }, { "late_code", late_code },
        { "early_writable_code", early_writable_code }, { "keeps_errors", keeps_errors },
    };
    return choose(all, sizeof all / sizeof *all, argument[arguments - 1]);
}
#endif

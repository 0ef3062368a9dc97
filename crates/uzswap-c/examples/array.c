/* An array four times as large as the memory it may take.
 *
 *     cc array.c $(pkg-config --cflags --libs uzswap) -o array && ./array
 */
#include <stdint.h>
#include <stdio.h>
#include <uzswap.h>

enum { COUNT = 8 << 20 };

int main(void) {
    uzswap_options options = UZSWAP_OPTIONS_INIT;
    options.memory = 16 << 20;
    options.backing = "/var/tmp/uzswap-array.pages:128M"; /* squares compress badly */
    uzswap_pager *pager = uzswap_pager_new(&options);
    remove("/var/tmp/uzswap-array.pages"); /* its content goes with the process */
    uint64_t *numbers = pager ? uzswap_map(pager, COUNT * sizeof *numbers) : NULL;
    if (!numbers) {
        fprintf(stderr, "array: %s\n", uzswap_last_error());
        return 1;
    }

    /* From here on it is an ordinary array: a table of squares, 64 MiB in 16. */
    for (uint64_t i = 0; i < COUNT; i++)
        numbers[i] = i * i;
    uint64_t wrong = 0;
    for (uint64_t i = 0; i < COUNT; i++)
        wrong += numbers[i] != i * i;

    uint64_t stored = 0;
    uzswap_stat(pager, "stored_pages", &stored);
    printf("%d squares, %d wrong, %s\n", COUNT, (int)wrong,
           stored > 0 ? "some of them compressed" : "all in memory");

    if (uzswap_unmap(pager, numbers) || uzswap_pager_free(pager)) {
        fprintf(stderr, "array: %s\n", uzswap_last_error());
        return 1;
    }
    return wrong != 0;
}

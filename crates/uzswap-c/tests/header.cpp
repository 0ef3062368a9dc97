// The header in C++: its options, and a name that must have C linkage.
#include <uzswap.h>

int main() {
    uzswap_options options = UZSWAP_OPTIONS_INIT;
    options.memory = 16 << 20;
    uzswap_pager *pager = uzswap_pager_new(&options);
    return pager ? uzswap_pager_free(pager) : 1;
}

/* Whether this process may use tiles (AMX): 0 if so, and from then on. Linux asks to be asked once,
   because a thread with tiles has 8 KiB more to save. Some virtual machines show the processor's
   flag and have no tiles. */

#define _GNU_SOURCE
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { REQUEST = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA */

int permission(void) {
    unsigned palettes = 0, b, c, d;
    if (!__get_cpuid_count(0x1d, 0, &palettes, &b, &c, &d) || palettes < 1) return 1;
    if (syscall(SYS_arch_prctl, REQUEST, TILE_DATA)) return 2;
    _tile_release(); /* so that a compiler without tiles fails here */
    return 0;
}

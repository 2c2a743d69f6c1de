/* SPDX-License-Identifier: Apache-2.0 */
/* Configuration of the cores for a machine without a C library: the compiler's own forms of the
 * memory functions, which need no declaration. A call past the macros would not compile. */
#define HASHFMT_MEMCPY __builtin_memcpy
#define HASHFMT_MEMSET __builtin_memset

#define CKF_MEMCPY __builtin_memcpy
#define CKF_MEMSET __builtin_memset
#define CKF_MEMCMP __builtin_memcmp

#define KVRELAY_MEMCPY __builtin_memcpy
#define KVRELAY_MEMMOVE __builtin_memmove
#define KVRELAY_MEMSET __builtin_memset
#define KVRELAY_MEMCMP __builtin_memcmp

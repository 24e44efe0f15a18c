/* unpack_fatbin.h: the compiled kernel (unpack.cu), as the build embeds it. */
#ifndef LK_TRANSFER_DEVICE_UNPACK_FATBIN_H
#define LK_TRANSFER_DEVICE_UNPACK_FATBIN_H

extern const unsigned long long lk_unpack_fatbin[];

#endif

/*
 * What a GPU does with tensors that have arrived (transfer/device): copied as the driver copies
 * them, placed, placed and digested, digested in place. bench_device [cuda|host] [MB]: a model of
 * matrices of 96 MB and as many small vectors; p50 and p95 over ROUNDS. Rates are bytes of weights
 * over time; the device copy is the floor of "copy" and of "copy, digest", reading alone (half of
 * it) that of "digest". Without a GPU there is nothing to measure.
 */
#include "base/check.h"
#include "base/env.h"
#include "transfer/device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDS       30
#define MATRIX_BYTES (96u << 20)
#define VECTOR_BYTES 8192u

static device_t *device;
static device_stream_t *stream;
static lk_error_t err = LK_ERROR_INIT;

static void must(lk_status_t status)
{
    CHECKF(status == LK_OK, "%s", err.text);
}

static char *alloc(uint64_t bytes)
{
    void *out = NULL;
    must(device->ops->alloc(device, bytes, &out, &err));
    return out;
}

typedef struct {
    const char *name;
    bool driver; /* its own copy, tensor by tensor */
    bool digests;
    bool places;
    lk_dtype_t from, to;
    bool beside; /* as if a collective ran */
} case_t;

static const case_t cases[] = {
    {"device copy", true, false, true, LK_DTYPE_BF16, LK_DTYPE_BF16},
    {"copy", false, false, true, LK_DTYPE_BF16, LK_DTYPE_BF16},
    {"copy, beside a collective", false, false, true, LK_DTYPE_BF16, LK_DTYPE_BF16, true},
    {"copy, digest", false, true, true, LK_DTYPE_BF16, LK_DTYPE_BF16},
    {"digest in place", false, true, false, LK_DTYPE_BF16, LK_DTYPE_BF16},
    {"digest in place, beside", false, true, false, LK_DTYPE_BF16, LK_DTYPE_BF16, true},
    {"digest in place, float32", false, true, false, LK_DTYPE_F32, LK_DTYPE_F32},
    {"float32 to bfloat16, digest", false, true, true, LK_DTYPE_F32, LK_DTYPE_BF16},
};

static int compare(const void *a, const void *b)
{
    const double *x = a, *y = b;
    return *x < *y ? -1 : *x > *y;
}

/* Pairs of a matrix and a vector, back to back. */
static size_t make_pieces(const case_t *c, char *src, char *dst, uint64_t *lanes, uint64_t bytes,
                          device_piece_t *out)
{
    size_t n = 0, from = dtype_bytes(c->from), to = dtype_bytes(c->to);
    uint64_t at = 0;
    while (at + MATRIX_BYTES + VECTOR_BYTES <= bytes) {
        for (int small = 0; small < 2; small++) {
            uint64_t numel = (small ? VECTOR_BYTES : MATRIX_BYTES) / from;
            out[n] = (device_piece_t){.src = src + at,
                                      .src_dtype = c->from,
                                      .dst_dtype = c->to,
                                      .dst = c->places ? dst + at / from * to : NULL,
                                      .rows = 1,
                                      .cols = numel,
                                      .dst_pitch = numel,
                                      .lanes = c->digests ? lanes + 2 * n : NULL};
            at += numel * from;
            n++;
        }
    }
    return n;
}

static double run_once(const case_t *c, const device_piece_t *pieces, size_t n)
{
    uint64_t start = lk_env_now_ns(lk_env_real());
    if (c->driver) {
        for (size_t i = 0; i < n; i++) {
            must(device->ops->copy(device, pieces[i].dst, pieces[i].src,
                                   pieces[i].cols * dtype_bytes(c->from), stream, &err));
        }
    } else {
        device->beside = c->beside;
        must(device->ops->unpack(device, pieces, n, stream, &err));
        device->beside = false;
    }
    must(device_wait(device, stream, &err));
    return (double)(lk_env_now_ns(lk_env_real()) - start);
}

static double measure(const case_t *c, const device_piece_t *pieces, size_t n, double floor)
{
    double ns[ROUNDS];
    uint64_t bytes = 0;
    for (size_t i = 0; i < n; i++) {
        bytes += pieces[i].cols * dtype_bytes(c->from);
    }
    run_once(c, pieces, n);
    for (int i = 0; i < ROUNDS; i++) {
        ns[i] = run_once(c, pieces, n);
    }
    qsort(ns, ROUNDS, sizeof ns[0], compare);
    double p50 = ns[ROUNDS / 2], p95 = ns[ROUNDS * 95 / 100];
    double rate = (double)bytes / p50;
    printf("%-30s %8.3f ms p50 %8.3f ms p95 %8.1f GB/s", c->name, p50 / 1e6, p95 / 1e6, rate);
    printf(floor > 0 ? "  %.2f of the device copy\n" : "\n", rate / floor);
    return rate;
}

int main(int argc, char **argv)
{
    const char *kind = argc > 1 ? argv[1] : "cuda";
    uint64_t bytes = (argc > 2 ? strtoull(argv[2], NULL, 10) : 16384) << 20;
    if (device_count(kind) == 0) {
        printf("no %s device: nothing to measure\n", kind);
        return 0;
    }
    must(device_open(kind, 0, &device, &err));
    must(device->ops->stream_new(device, &stream, &err));
    size_t most = 2 * (bytes / MATRIX_BYTES + 1);
    char *src = alloc(bytes), *dst = alloc(bytes);
    uint64_t *lanes = (uint64_t *)alloc(most * 16);
    device_piece_t *pieces = calloc(most, sizeof *pieces);
    CHECK(pieces != NULL);
    must(device->ops->zero(device, src, bytes, stream, &err));
    must(device->ops->zero(device, lanes, most * 16, stream, &err));
    printf("%s, %llu MB of weights\n", device->text, (unsigned long long)(bytes >> 20));
    double floor = 0;
    for (size_t i = 0; i < LK_ARRAY_LEN(cases); i++) {
        size_t n = make_pieces(&cases[i], src, dst, lanes, bytes, pieces);
        double rate = measure(&cases[i], pieces, n, floor);
        floor = i == 0 ? rate : floor;
    }
    free(pieces);
    device->ops->free(device, src);
    device->ops->free(device, dst);
    device->ops->free(device, lanes);
    device->ops->stream_destroy(device, stream);
    device_close(&device);
    return 0;
}

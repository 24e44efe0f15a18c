#include "transfer/safetensors_header.h"

#include "base/check.h"
#include "base/file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_FILES       4096
#define INDEX_MAX_BYTES (48u << 20)

typedef struct {
    void *base; /* NULL for an empty mapping */
    size_t size;
    int fd;
} mapping_t;

struct safetensors {
    mapping_t *maps;
    size_t n_maps;
    json_t **headers; /* own the names */
    size_t n_headers;
    safetensors_entry_t *entries; /* by file, then by offset */
    size_t n_entries;
    uint32_t *by_name; /* indices of entries */
};

/* Adds one file's tensors; `bytes` as in safetensors_header_read. Entries get no data pointers when
 * only the header is there. */
static lk_status_t add_file(safetensors_t *self, const char *bytes, size_t len, uint64_t file_size,
                            bool mapped, lk_error_t *err)
{
    safetensors_header_t header;
    LK_RETURN_IF_ERROR(safetensors_header_read(bytes, len, file_size, &header, err));
    lk_status_t status = LK_OK;
    json_t **names = realloc(self->headers, (self->n_headers + 1) * sizeof *names);
    self->headers = names != NULL ? names : self->headers;
    size_t total = self->n_entries + header.n_spans;
    safetensors_entry_t *entries = realloc(self->entries, (total + 1) * sizeof *entries);
    self->entries = entries != NULL ? entries : self->entries;
    if (names == NULL || entries == NULL) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %zu tensors", total);
    } else if (total > SAFETENSORS_MAX_TENSORS) {
        status =
            lk_error_set(err, LK_ERR_TOO_LARGE, "more than %u tensors", SAFETENSORS_MAX_TENSORS);
    } else {
        self->headers[self->n_headers++] = json_incref(header.json);
        for (size_t i = 0; i < header.n_spans; i++) {
            safetensors_entry_t *entry = &self->entries[self->n_entries++];
            *entry = header.spans[i].entry;
            entry->data = mapped ? bytes + header.data_start + header.spans[i].begin : NULL;
        }
    }
    safetensors_header_fini(&header);
    return status;
}

/* ---- the index by name ---- */

static int name_order(const void *pa, const void *pb, void *ctx)
{
    const safetensors_t *self = ctx;
    return strcmp(self->entries[*(const uint32_t *)pa].desc.name,
                  self->entries[*(const uint32_t *)pb].desc.name);
}

static lk_status_t index_names(safetensors_t *self, lk_error_t *err)
{
    self->by_name = calloc(self->n_entries + 1, sizeof *self->by_name);
    if (self->by_name == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for %zu tensors", self->n_entries);
    }
    for (size_t i = 0; i < self->n_entries; i++) {
        self->by_name[i] = (uint32_t)i;
    }
    qsort_r(self->by_name, self->n_entries, sizeof *self->by_name, name_order, self);
    for (size_t i = 1; i < self->n_entries; i++) {
        if (name_order(&self->by_name[i - 1], &self->by_name[i], self) == 0) {
            return lk_error_set(err, LK_ERR_INVALID, "tensor %s is in two files",
                                self->entries[self->by_name[i]].desc.name);
        }
    }
    return LK_OK;
}

const safetensors_entry_t *safetensors_find(const safetensors_t *self, const char *name)
{
    size_t low = 0, high = self->n_entries;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        const safetensors_entry_t *entry = &self->entries[self->by_name[mid]];
        int order = strcmp(name, entry->desc.name);
        if (order == 0) {
            return entry;
        }
        if (order < 0) {
            high = mid;
        } else {
            low = mid + 1;
        }
    }
    return NULL;
}

size_t safetensors_count(const safetensors_t *self)
{
    return self->n_entries;
}

const safetensors_entry_t *safetensors_at(const safetensors_t *self, size_t i)
{
    CHECK(i < self->n_entries);
    return &self->entries[i];
}

/* ---- files ---- */

static lk_status_t map_file(safetensors_t *self, const char *path, lk_error_t *err)
{
    int fd;
    uint64_t size;
    LK_RETURN_IF_ERROR(file_open(path, &fd, &size, err));
    mapping_t *maps = realloc(self->maps, (self->n_maps + 1) * sizeof *maps);
    if (maps == NULL || size > SIZE_MAX) {
        close(fd);
        self->maps = maps != NULL ? maps : self->maps;
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory to map it", path);
    }
    self->maps = maps;
    mapping_t map = {NULL, (size_t)size, fd};
    if (size > 0) {
        map.base = mmap(NULL, map.size, PROT_READ, MAP_PRIVATE, fd, 0);
    }
    if (map.base == MAP_FAILED) {
        int saved = errno;
        close(fd);
        return lk_error_set(err, saved == ENOMEM ? LK_ERR_NO_MEMORY : LK_ERR_IO, "%s: %s", path,
                            strerror(saved));
    }
    self->maps[self->n_maps++] = map;
    lk_status_t status = add_file(self, map.base, map.size, size, true, err);
    return status < 0 ? (lk_error_prefix(err, "%s", path), status) : LK_OK;
}

/* Maps each file of the index once, then compares where tensors are with where it says. */
static lk_status_t open_indexed(safetensors_t *self, const char *dir, const json_t *weight_map,
                                lk_error_t *err)
{
    const char *name;
    json_t *file, *files = json_object(); /* file name -> number */
    lk_status_t status = LK_OK;
    char path[FILE_PATH_MAX];
    size_t *file_end = NULL; /* entries before the end of each file */
    json_object_foreach((json_t *)weight_map, name, file)
    {
        const char *plain = json_string_value(file);
        size_t known = json_object_size(files);
        if (plain == NULL || !file_name_is_plain(plain)) {
            status = lk_error_set(err, LK_ERR_INVALID,
                                  "weight_map: tensor %.255s: \"%.60s\" is not a plain file name",
                                  name, plain != NULL ? plain : "");
        } else if (json_object_get(files, plain) != NULL) {
            continue;
        } else if (known == MAX_FILES) {
            status =
                lk_error_set(err, LK_ERR_TOO_LARGE, "weight_map: more than %d files", MAX_FILES);
        } else if (json_object_set_new(files, plain, json_integer((json_int_t)known)) != 0) {
            status = lk_error_set(err, LK_ERR_NO_MEMORY, "weight_map: no memory");
        } else {
            status = file_path(path, dir, plain, err);
            status = status < 0 ? status : map_file(self, path, err);
            size_t *grown = realloc(file_end, (known + 1) * sizeof *file_end);
            file_end = grown != NULL ? grown : file_end;
            if (grown == NULL) {
                status = lk_error_set(err, LK_ERR_NO_MEMORY, "weight_map: no memory");
            } else {
                file_end[known] = self->n_entries;
            }
        }
        if (status < 0) {
            goto done;
        }
    }
    status = index_names(self, err);
    if (status < 0) {
        goto done;
    }
    json_object_foreach((json_t *)weight_map, name, file)
    {
        const safetensors_entry_t *entry = safetensors_find(self, name);
        size_t i = (size_t)json_integer_value(json_object_get(files, json_string_value(file)));
        size_t at = entry != NULL ? (size_t)(entry - self->entries) : 0;
        if (entry == NULL || at >= file_end[i] || (i > 0 && at < file_end[i - 1])) {
            status = lk_error_set(err, LK_ERR_INVALID, "weight_map: tensor %.255s is not in %s",
                                  name, json_string_value(file));
            goto done;
        }
    }
    if (json_object_size(weight_map) != self->n_entries) {
        for (size_t i = 0; i < self->n_entries; i++) {
            const char *extra = self->entries[i].desc.name;
            if (json_object_get(weight_map, extra) == NULL) {
                status = lk_error_set(err, LK_ERR_INVALID, "weight_map lacks tensor %s", extra);
                goto done;
            }
        }
    }
done:
    free(file_end);
    json_decref(files);
    return status;
}

static lk_status_t open_index(safetensors_t *self, const char *dir, lk_error_t *err)
{
    char path[FILE_PATH_MAX];
    lk_buf_t text;
    json_t *root = NULL;
    LK_RETURN_IF_ERROR(file_path(path, dir, "model.safetensors.index.json", err));
    lk_buf_init(&text, 0);
    lk_status_t status = file_read(path, INDEX_MAX_BYTES, &text, err);
    if (status == LK_ERR_NOT_FOUND) {
        status =
            lk_error_set(err, LK_ERR_NOT_FOUND,
                         "%s: neither model.safetensors nor model.safetensors.index.json", dir);
    }
    if (status == LK_OK) {
        status = safetensors_json(lk_buf_cstr(&text), text.len, 8, "index", &root, err);
        if (status < 0) {
            lk_error_prefix(err, "%s", path);
        }
    }
    lk_buf_fini(&text);
    LK_RETURN_IF_ERROR(status);
    const json_t *weight_map = json_object_get(root, "weight_map");
    if (!json_is_object(weight_map) || json_object_size(weight_map) == 0) {
        status = lk_error_set(err, LK_ERR_INVALID, "%s: weight_map is not an object of file names",
                              path);
    } else {
        status = open_indexed(self, dir, weight_map, err);
    }
    json_decref(root);
    return status;
}

static lk_status_t open_any(safetensors_t *self, const char *path, lk_error_t *err)
{
    char inside[FILE_PATH_MAX];
    LK_RETURN_IF_ERROR(file_path(inside, path, "model.safetensors", err));
    /* access() decides only which of the names is used; map_file checks for itself. */
    bool one_file = access(inside, F_OK) == 0;
    size_t len = strlen(path);
    bool is_file = len > 12 && strcmp(path + len - 12, ".safetensors") == 0;
    if (!one_file && !is_file) {
        return open_index(self, path, err);
    }
    LK_RETURN_IF_ERROR(map_file(self, one_file ? inside : path, err));
    return index_names(self, err);
}

lk_status_t safetensors_open(const char *path, safetensors_t **out, lk_error_t *err)
{
    safetensors_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory", path);
    }
    lk_status_t status = open_any(self, path, err);
    if (status < 0) {
        safetensors_close(&self);
        return status;
    }
    *out = self;
    return LK_OK;
}

lk_status_t safetensors_parse_header(const void *bytes, size_t len, uint64_t file_size,
                                     safetensors_t **out, lk_error_t *err)
{
    safetensors_t *self = calloc(1, sizeof *self);
    if (self == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory");
    }
    lk_status_t status = add_file(self, bytes, len, file_size, false, err);
    if (status == LK_OK) {
        status = index_names(self, err);
    }
    if (status < 0) {
        safetensors_close(&self);
        return status;
    }
    *out = self;
    return LK_OK;
}

void safetensors_close(safetensors_t **self_p)
{
    safetensors_t *self = self_p != NULL ? *self_p : NULL;
    if (self == NULL) {
        return;
    }
    for (size_t i = 0; i < self->n_maps; i++) {
        if (self->maps[i].base != NULL) {
            munmap(self->maps[i].base, self->maps[i].size);
        }
        close(self->maps[i].fd);
    }
    for (size_t i = 0; i < self->n_headers; i++) {
        json_decref(self->headers[i]);
    }
    free(self->maps);
    free(self->headers);
    free(self->entries);
    free(self->by_name);
    free(self);
    *self_p = NULL;
}

lk_status_t safetensors_read(const safetensors_t *self, const safetensors_entry_t *entry,
                             uint64_t offset, void *out, uint64_t n, lk_error_t *err)
{
    CHECK(offset <= entry->bytes && n <= entry->bytes - offset);
    const char *data = entry->data;
    const mapping_t *map = self->maps;
    while (data < (const char *)map->base || data >= (const char *)map->base + map->size) {
        map++;
        CHECK(map < self->maps + self->n_maps);
    }
    uint64_t at = (uint64_t)(data - (const char *)map->base) + offset;
    for (uint64_t done = 0; done < n;) {
        ssize_t got = pread(map->fd, (char *)out + done, n - done, (off_t)(at + done));
        if (got > 0) {
            done += (uint64_t)got;
        } else if (got == 0) {
            return lk_error_set(err, LK_ERR_IO, "the file has become shorter");
        } else if (errno != EINTR) {
            return lk_error_set(err, LK_ERR_IO, "cannot read it: %s", strerror(errno));
        }
    }
    return LK_OK;
}

bool safetensors_is_rotary_buffer(const char *name)
{
    static const char *const ends[] = {".rotary_emb.inv_freq", ".rotary_emb.cos_cached",
                                       ".rotary_emb.sin_cached"};
    size_t len = strlen(name);
    for (size_t i = 0; i < LK_ARRAY_LEN(ends); i++) {
        size_t n = strlen(ends[i]);
        if (len > n && strcmp(name + len - n, ends[i]) == 0) {
            return true;
        }
    }
    return false;
}

/* ---- writing ---- */

lk_status_t safetensors_write(const char *path, const tensor_desc_t *descs, const void *const *data,
                              size_t n, lk_error_t *err)
{
    lk_buf_t header;
    uint64_t at = 0;
    lk_status_t status = LK_OK;
    lk_buf_init(&header, SAFETENSORS_HEADER_MAX_BYTES);
    file_part_t *parts = calloc(n + 2, sizeof *parts);
    lk_buf_str(&header, "{\"__metadata__\":{\"format\":\"pt\"}"); /* Transformers insists on it */
    for (size_t i = 0; i < n && parts != NULL; i++) {
        uint64_t bytes;
        char shape[160];
        tensor_desc_shape_text(&descs[i], shape, sizeof shape);
        if (!tensor_desc_bytes(&descs[i], &bytes)) {
            status = lk_error_set(err, LK_ERR_INVALID, "%s: tensor %s: shape %s is too large", path,
                                  descs[i].name, shape);
            goto done;
        }
        lk_buf_str(&header, ",");
        lk_buf_json_str(&header, descs[i].name, strlen(descs[i].name));
        lk_buf_printf(&header, ":{\"dtype\":\"%s\",\"shape\":%s,\"data_offsets\":[%llu,%llu]}",
                      dtype_safetensors_name(descs[i].dtype), shape, (unsigned long long)at,
                      (unsigned long long)(at + bytes));
        parts[i + 2] = (file_part_t){data[i], bytes};
        at += bytes;
    }
    lk_buf_str(&header, "}");
    while (header.len % 8 != 0 && !header.failed) {
        lk_buf_str(&header, " "); /* data starts at a multiple of 8 */
    }
    if (parts == NULL || header.failed) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "%s: no memory for the header", path);
        goto done;
    }
    uint8_t prefix[8];
    for (int i = 0; i < 8; i++) {
        prefix[i] = (uint8_t)((uint64_t)header.len >> (8 * i));
    }
    parts[0] = (file_part_t){prefix, sizeof prefix};
    parts[1] = (file_part_t){header.data, header.len};
    status = file_write(path, parts, n + 2, err);
done:
    free(parts);
    lk_buf_fini(&header);
    return status;
}

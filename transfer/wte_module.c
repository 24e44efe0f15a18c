#include "transfer/wte_module.h"

#include "base/check.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAME_MAX_LENGTH 32

/* A name becomes part of a path. */
static bool name_ok(const char *name)
{
    size_t n = strlen(name);
    return n > 0 && n <= NAME_MAX_LENGTH &&
           strspn(name, "abcdefghijklmnopqrstuvwxyz0123456789_") == n;
}

static bool exists(const char *directory, const char *below, const char *name, char *path,
                   size_t room)
{
    struct stat st;
    int n = snprintf(path, room, "%s%s/transfer_%s.so", directory, below, name);
    return n > 0 && (size_t)n < room && stat(path, &st) == 0;
}

static bool find(const char *name, const char *directory, char *path, size_t room)
{
    static const char *const places[] = {"", "/../lib/lockstep", "/../transfer"};
    if (directory != NULL && directory[0] != '\0') {
        return exists(directory, "", name, path, room);
    }
    char program[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 1);
    if (n <= 0) {
        return false;
    }
    program[n] = '\0';
    *strrchr(program, '/') = '\0';
    for (size_t i = 0; i < LK_ARRAY_LEN(places); i++) {
        if (exists(program, places[i], name, path, room)) {
            return true;
        }
    }
    return false;
}

static lk_status_t check_table(const wte_ops_t *ops, const char *name, const char *path,
                               lk_error_t *err)
{
    if (ops == NULL || ops->abi_version != WTE_ABI_VERSION) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED,
                            "%s was built for another version of the engine interface than %u",
                            path, WTE_ABI_VERSION);
    }
    if (!wte_ops_whole(ops)) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "%s lacks a mandatory operation", path);
    }
    if (ops->name == NULL || strcmp(ops->name, name) != 0) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "%s is the engine '%.64s', not '%s'", path,
                            ops->name != NULL ? ops->name : "", name);
    }
    return LK_OK;
}

static lk_status_t load(const char *name, const char *path, const wte_ops_t **out, lk_error_t *err)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return lk_error_set(err, LK_ERR_UNSUPPORTED, "cannot load the transfer engine %s: %s", name,
                            dlerror());
    }
    wte_module_entry_t entry;
    *(void **)&entry = dlsym(library, WTE_MODULE_ENTRY);
    lk_status_t status;
    const wte_ops_t *ops = NULL;
    if (entry == NULL) {
        status =
            lk_error_set(err, LK_ERR_UNSUPPORTED, "%s has no function " WTE_MODULE_ENTRY, path);
    } else {
        ops = entry(WTE_ABI_VERSION);
        status = check_table(ops, name, path, err);
    }
    if (status < 0) {
        dlclose(library);
        return status;
    }
    *out = ops; /* stays loaded: its table is in use until the process ends */
    return LK_OK;
}

lk_status_t wte_open(const char *name, const char *directory, const wte_ops_t **out,
                     lk_error_t *err)
{
    const wte_ops_t *built_in = wte_find(name);
    if (built_in != NULL) {
        *out = built_in;
        return LK_OK;
    }
    char path[PATH_MAX];
    if (name_ok(name) && find(name, directory, path, sizeof path)) {
        return load(name, path, out, err);
    }
    return lk_error_set(err, LK_ERR_INVALID,
                        "Invalid weight transfer backend: %.64s. Available engines: [%s], and "
                        "modules transfer_NAME.so in %.255s",
                        name, wte_names(),
                        directory != NULL && directory[0] != '\0' ? directory
                                                                  : "the program's directory");
}

#include "transfer/safetensors.h"
#include "engine_core/exec/weight_plan.h"

#include "base/check.h"

#include <stdlib.h>
#include <string.h>

lk_status_t weight_table_check_whole(const weight_table_t *table, const tensor_desc_t *descs,
                                     size_t n, lk_error_t *err)
{
    offenders_t offenders = {.n = 0};
    name_rules_dims_t dims;
    weight_plan_t plan;
    size_t n_slots = weight_table_count(table);
    bool *covered = calloc(n_slots, sizeof *covered);
    if (covered == NULL) {
        return lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for a list of %zu tensors", n);
    }
    model_config_dims(weight_table_config(table), &dims);
    lk_status_t status = weight_plan_build(table, &dims, descs, n, &offenders, &plan, err);
    if (status == LK_OK) {
        for (size_t i = 0; i < plan.n_pieces; i++) {
            covered[plan.pieces[i].slot] = true;
        }
        weight_plan_fini(&plan);
        for (size_t i = 0; i < n_slots; i++) {
            if (!covered[i]) {
                offenders_add(&offenders, "tensor %s: missing", weight_table_at(table, i)->name);
            }
        }
        status = offenders_finish(&offenders, err);
    }
    free(covered);
    return status;
}

static lk_status_t load_entries(const weight_table_t *table, const weight_sink_t *sink,
                                const safetensors_t *file, lk_error_t *err)
{
    size_t n = 0, total = safetensors_count(file);
    tensor_desc_t *descs = calloc(total + 1, sizeof *descs);
    const safetensors_entry_t **entries = calloc(total + 1, sizeof *entries);
    lk_status_t status = LK_OK;
    if (descs == NULL || entries == NULL) {
        status = lk_error_set(err, LK_ERR_NO_MEMORY, "no memory for a list of %zu tensors", total);
        goto done;
    }
    for (size_t i = 0; i < total; i++) {
        const safetensors_entry_t *entry = safetensors_at(file, i);
        if (!safetensors_is_rotary_buffer(entry->desc.name)) {
            entries[n] = entry;
            descs[n++] = entry->desc;
        }
    }
    status = weight_table_check_whole(table, descs, n, err);
    if (status == LK_OK) {
        status = sink->ops->plan(sink->ctx, descs, n, err);
    }
    if (status < 0) {
        goto done;
    }
    sink->ops->begin(sink->ctx);
    for (size_t i = 0; i < n && status == LK_OK; i++) {
        status = weight_sink_store(sink, i, entries[i]->data, entries[i]->bytes, err);
    }
    if (status == LK_OK) {
        status = weight_sink_commit(sink, err);
    }
    sink->ops->begin(sink->ctx);
done:
    free(entries);
    free(descs);
    return status;
}

lk_status_t weight_table_load(weight_table_t *self, const char *dir, lk_error_t *err)
{
    weight_sink_t sink = weight_table_sink(self);
    return weight_table_load_into(self, &sink, dir, err);
}

lk_status_t weight_table_load_into(const weight_table_t *names, const weight_sink_t *sink,
                                   const char *dir, lk_error_t *err)
{
    safetensors_t *file;
    LK_RETURN_IF_ERROR(safetensors_open(dir, &file, err));
    lk_status_t status = load_entries(names, sink, file, err);
    safetensors_close(&file);
    if (status < 0) {
        lk_error_prefix(err, "%s", dir);
    }
    return status;
}

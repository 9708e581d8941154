// The table of one variant. Compiled once for each, with -DVARIANT=its name.
#include "gemm.h"

// attention.c
int64_t NAME(queries)(const Pages *pages);
int64_t NAME(attend_scratch)(const Pages *pages);
void NAME(attend)(const Pages *pages, const int32_t *table, int64_t position, int64_t count, int64_t kv_head,
                  const float *q, int64_t q_stride, float *o, int64_t o_stride, void *scratch);
int64_t NAME(part_floats)(const Pages *pages);
void NAME(attend_segment)(const Pages *pages, const int32_t *table, int64_t position, int64_t kv_head, int64_t segment,
                          const float *q, float *part, void *scratch);
void NAME(merge)(const Pages *pages, const float *parts, int64_t num_parts, float *o);

#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)

const Variant NAME(variant) = {
    .name = TEXT(VARIANT),
    .panel_bytes = NAME(panel_bytes),
    .pack = NAME(pack),
    .activation_bytes = NAME(activation_bytes),
    .prepare = NAME(prepare),
    .multiply = NAME(multiply),
    .tile = NAME(tile),
    .queries = NAME(queries),
    .attend_scratch = NAME(attend_scratch),
    .attend = NAME(attend),
    .part_floats = NAME(part_floats),
    .attend_segment = NAME(attend_segment),
    .merge = NAME(merge),
};

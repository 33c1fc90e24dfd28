// What Python calls in this library beside the operations, through ctypes: a graph-mode program has
// no operations that run at once.
#ifndef BAGUA_TENSORFLOW_PYTHON_BORDER_H_
#define BAGUA_TENSORFLOW_PYTHON_BORDER_H_

#include <stdint.h>

#include "common/c_api.h"

extern "C" {

// A tensor of a plan.
typedef struct bagua_tensorflow_tensor {
  const char* name;
  int32_t dtype;  // bagua_dtype_t
  int32_t ndim;
  const int64_t* shape;
} bagua_tensorflow_tensor_t;

// Fills slot `slot` with the core's plan `plan`, whose tensors are given in the plan's order. After
// a value other than 0 bagua_tensorflow_last_error() has the text.
BAGUA_EXPORT int bagua_tensorflow_fill_slot(int64_t slot, uint64_t plan, int32_t count,
                                            const bagua_tensorflow_tensor_t* tensors);
BAGUA_EXPORT void bagua_tensorflow_empty_slot(int64_t slot);
// Of the calling thread; valid until its next call.
BAGUA_EXPORT const char* bagua_tensorflow_last_error(void);

// Eager operations ask `interrupted` about every 100 ms whether a signal handler raised; it takes
// Python's lock and runs pending handlers. The same function as bagua_init takes.
BAGUA_EXPORT void bagua_tensorflow_watch_interrupts(int (*interrupted)(void));

}  // extern "C"

#endif  // BAGUA_TENSORFLOW_PYTHON_BORDER_H_

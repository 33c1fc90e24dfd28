// Names the TensorFlow that this library fits, in a form that is found without loading it.

#include "common/c_api.h"

extern "C" BAGUA_EXPORT const char bagua_tensorflow_built_for[] =
    "BAGUA_BUILT_FOR_TENSORFLOW=" BAGUA_TENSORFLOW_VERSION "\n";

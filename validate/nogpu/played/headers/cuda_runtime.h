// What cuDNN's headers ask for by this name; the full file needs the CUDA compiler's.
#pragma once
#include <cuda_runtime_api.h>

// The compiler's marks in NVIDIA's public headers, as a host compiler takes them: nothing, or an alignment.
// CUDA's own file of this name comes with the CUDA compiler, which a pip install of PyTorch does not bring.
#pragma once
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device__
#define __host__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define __location__(a)
#define __specialization_static static
#define CUDARTAPI
#define CUDARTAPI_CDECL

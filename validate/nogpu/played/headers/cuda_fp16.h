// What cuBLAS's and NCCL's headers ask for by this name: of its types only the name is needed.
#pragma once
struct __half;

// What NCCL's header asks for by this name, and uses none of.
#pragma once

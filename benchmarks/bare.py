"""The least that `accelerate launch` can be asked for: prepare a model, take one optimizer step."""

import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
inputs = torch.randn(32, 64, device=accelerator.device)
targets = torch.randint(10, (32,), device=accelerator.device)
accelerator.backward(torch.nn.functional.cross_entropy(model(inputs), targets))
optimizer.step()
if accelerator.is_main_process:
    print(f"first step done ({accelerator.num_processes} processes)", flush=True)

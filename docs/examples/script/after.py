"""The same script on as many devices as accelerate_config.yaml says."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .backend import accelerator_options

accelerator = Accelerator(**accelerator_options())
torch.manual_seed(0)

digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1500], labels[:1500])
test_set = TensorDataset(images[1500:], labels[1500:])
train_loader = DataLoader(train_set, batch_size=50 // accelerator.num_processes, shuffle=True)
test_loader = DataLoader(test_set, batch_size=50)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, train_loader, test_loader = accelerator.prepare(
    model, optimizer, train_loader, test_loader
)

for _epoch in range(10):
    for inputs, targets in train_loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

correct = 0
model.eval()
with torch.no_grad():
    for inputs, targets in test_loader:
        right = model(inputs).argmax(dim=1) == targets
        correct += accelerator.gather_for_metrics(right).sum().item()
accelerator.print(f"test accuracy {correct / len(test_set):.4f}")
accelerator.end_training()

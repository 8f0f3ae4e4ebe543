"""The captions with loaders of torch, as their author had them before."""

import captions
from torch.utils.data import DataLoader


class Album(captions.Album):
    def train_dataloader(self):
        rows = captions.Pictures(0, 120, augment=True)
        return DataLoader(
            rows,
            self.batch.micro_size,
            shuffle=True,
            collate_fn=captions.collate,
            num_workers=self.workers,
        )

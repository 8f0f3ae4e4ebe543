"""The captions with a picture that can't be read."""

import captions


class Damaged(captions.Album):
    def train_dataloader(self):
        loader = super().train_dataloader()
        loader.batches.reader.dataset = Broken(0, 120, augment=True)
        return loader


class Broken(captions.Pictures):
    def __getitem__(self, i):
        if i == 7:
            raise OSError("picture 7 is damaged")
        return super().__getitem__(i)

"""A program of someone who has Lightning's parts, and no package: captions of images."""

import torch

import lockstep


@lockstep.main("program", config_name="train")
def main(cfg, run):
    batch = lockstep.build(cfg.batch).spread_over(run.ranks)
    torch.manual_seed(cfg.seed)
    module = lockstep.build(cfg.module)
    trainer = lockstep.build(
        cfg.trainer,
        strategy=lockstep.build(cfg.strategy, batch=batch),
        accumulate_grad_batches=batch.accumulation,
        max_steps=cfg.max_steps,
        log_every_n_steps=cfg.log_every,
        logger=run.loggers(cfg.logger),
        callbacks=[
            lockstep.ValidateEvery(5),
            lockstep.MicroBatchSeeds(cfg.seed),
            lockstep.Metrics(batch, every=cfg.log_every),
            *lockstep.instantiate_all(cfg.callbacks),
            lockstep.GracefulStop(),
            lockstep.build(cfg.checkpoint, run=run),
            lockstep.StateInMemory(run, every=cfg.memory),
        ],
        plugins=run.plugins,
    )
    data = lockstep.build(cfg.data, batch=batch, seed=cfg.seed)
    run.announce(trainer, module, data, batch)
    trainer.fit(module, data, ckpt_path=run.checkpoint(trainer))
    return run.finish(trainer, metric="val/loss")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""A script as Horovod's Keras users write them, for farandole.as_horovod."""

import horovod.keras
import horovod.tensorflow as hvd
import horovod.tensorflow.keras as khvd
import keras
import numpy as np
import tensorflow as tf
from horovod.tensorflow.keras.callbacks import MetricAverageCallback
from horovod.tensorflow.keras.elastic import CommitStateCallback

hvd.init()
tf.random.set_seed(hvd.rank())
rng = np.random.default_rng(hvd.rank())
inputs = rng.normal(size=(64, 4)).astype("float32")
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
optimizer = khvd.DistributedOptimizer(
    keras.optimizers.SGD(0.01 * khvd.size()), compression=khvd.Compression.fp16
)
model.compile(optimizer, "mse", metrics=["mae"])
callbacks = [
    khvd.callbacks.BroadcastGlobalVariablesCallback(0),
    MetricAverageCallback(),
    horovod.keras.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * khvd.size()),
]
model.fit(inputs, inputs.sum(1), batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
kernel = model.trainable_variables[0].numpy()
assert np.array_equal(kernel, hvd.broadcast(kernel, root_rank=0).numpy())

with tf.GradientTape() as tape:
    loss = tf.reduce_mean(model(inputs) ** 2)
tape = hvd.DistributedGradientTape(tape)
(gradient,) = tape.gradient(loss, model.trainable_variables[:1])
assert np.array_equal(gradient.numpy(), hvd.broadcast(gradient, 0).numpy())


@hvd.elastic.run
def train(state):
    callbacks = [khvd.elastic.UpdateEpochStateCallback(state), CommitStateCallback(state, 2)]
    model.fit(inputs, inputs.sum(1), 16, 3 - state.epoch, verbose=0, callbacks=callbacks)
    return state.epoch


assert train(hvd.elastic.TensorFlowKerasState(model, batch=0, epoch=1)) == 3
assert horovod.keras.elastic.run(train)
assert hvd.elastic.TensorFlowState([tf.Variable(1.0)], step=2).step == 2
print(f"rank {hvd.rank()}: done", flush=True)

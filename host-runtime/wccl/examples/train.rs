//! Data-parallel training: each rank has data of its own and the whole model; gradients are averaged in the background, those of
//! the last layer while those of the first are still being computed.
//!
//! The model is small: 4 inputs, a layer of 16 with tanh, one output. It learns a function of its inputs; at the end every rank has
//! the same parameters, bit for bit, which the program checks.
//!
//! ```text
//! cargo xtask guests && cargo build --release --workspace --examples
//! target/release/wccl run -r 4 --tag -- target/release/examples/train
//! ```

use wccl::{Avg, Communicator, Max, Min};

const INPUTS: usize = 4;
const HIDDEN: usize = 16;
/// Examples of one rank.
const EXAMPLES: usize = 64;
const STEPS: usize = 400;
const RATE: f32 = 0.1;

/// Numbers from -1 to 1 that a seed decides (an xorshift).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    }

    fn take(&mut self, count: usize, scale: f32) -> Vec<f32> {
        (0..count).map(|_| self.next() * scale).collect()
    }
}

/// What is to be learned.
fn truth(x: &[f32]) -> f32 {
    0.5 * x[0] - 0.3 * x[1] + 0.8 * x[2] * x[3]
}

/// Weights and biases of a layer, in one vector, as they are reduced.
struct Layer {
    parameters: Vec<f32>,
    inputs: usize,
}

impl Layer {
    fn new(numbers: &mut Numbers, inputs: usize, outputs: usize) -> Layer {
        let scale = 1.0 / (inputs as f32).sqrt();
        Layer { parameters: numbers.take((inputs + 1) * outputs, scale), inputs }
    }

    /// Each output is its weights times the inputs, and its bias.
    fn apply(&self, x: &[f32]) -> Vec<f32> {
        let row = |w: &[f32]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>() + w[self.inputs];
        self.parameters.chunks(self.inputs + 1).map(row).collect()
    }

    /// Adds to `gradient` what one example says, whose outputs should change by `by`.
    fn learn(&self, gradient: &mut [f32], x: &[f32], by: &[f32]) {
        for (row, by) in gradient.chunks_mut(self.inputs + 1).zip(by) {
            for (g, x) in row.iter_mut().zip(x.iter().chain([&1.0])) {
                *g += by * x / EXAMPLES as f32;
            }
        }
    }

    fn step(&mut self, gradient: &[f32]) {
        for (p, g) in self.parameters.iter_mut().zip(gradient) {
            *p -= RATE * g;
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut comm = Communicator::from_env()?;
    let mut stream = comm.stream(0)?;
    let rank = comm.rank();

    // The same model everywhere: rank 0's. The data is each rank's own.
    let mut model = Numbers(17 + rank as u64);
    let (mut first, mut last) = (Layer::new(&mut model, INPUTS, HIDDEN), Layer::new(&mut model, HIDDEN, 1));
    comm.broadcast(&mut first.parameters, 0)?;
    comm.broadcast(&mut last.parameters, 0)?;
    let mut data = Numbers(1000 + rank as u64);
    let examples: Vec<Vec<f32>> = (0..EXAMPLES).map(|_| data.take(INPUTS, 1.0)).collect();

    let mut losses = Vec::with_capacity(STEPS);
    for _ in 0..STEPS {
        let hidden: Vec<Vec<f32>> =
            examples.iter().map(|x| first.apply(x).into_iter().map(f32::tanh).collect()).collect();
        let errors: Vec<f32> = examples.iter().zip(&hidden).map(|(x, h)| last.apply(h)[0] - truth(x)).collect();

        // The last layer's gradients are on their way ...
        let mut of_last = vec![0.0; last.parameters.len()];
        errors.iter().zip(&hidden).for_each(|(e, h)| last.learn(&mut of_last, h, &[*e]));
        let of_last = stream.all_reduce(of_last, Avg);

        // ... while those of the first are computed.
        let mut of_first = vec![0.0; first.parameters.len()];
        for ((x, h), e) in examples.iter().zip(&hidden).zip(&errors) {
            let back: Vec<f32> = h.iter().zip(&last.parameters).map(|(h, w)| e * w * (1.0 - h * h)).collect();
            first.learn(&mut of_first, x, &back);
        }
        let of_first = stream.all_reduce(of_first, Avg);

        last.step(&of_last.wait()?);
        first.step(&of_first.wait()?);
        losses.push(errors.iter().map(|e| e * e).sum::<f32>() / EXAMPLES as f32);
    }

    let mut loss = [losses[0], losses[STEPS - 1]];
    comm.all_reduce(&mut loss, Avg)?;
    // The largest and the smallest of each parameter are one if all ranks have the same.
    let mine: Vec<f32> = first.parameters.iter().chain(&last.parameters).copied().collect();
    let (mut most, mut least) = (mine.clone(), mine);
    comm.all_reduce(&mut most, Max)?;
    comm.all_reduce(&mut least, Min)?;
    if most != least {
        return Err("the ranks have different parameters".into());
    }
    println!(
        "rank {rank}: mean squared error {:.4}, then {:.4}; the parameters of all ranks are the same",
        loss[0], loss[1]
    );
    if loss[1] > loss[0] / 2.0 {
        return Err(format!("it did not learn: {loss:?}").into());
    }
    Ok(())
}

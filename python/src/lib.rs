//! The native half of the Python module `uzswap`: pagers, regions and NumPy's allocator. The Python
//! half is in `uzswap/`.

mod numpy;

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::ops::Range;
use uzswap_region::{Advice, MemorySize, Pinned, RegionRef};

create_exception!(
    uzswap,
    Error,
    PyException,
    "Memory cannot be paged, or an option is wrong. The message is one line with the remedy."
);

/// An error of the library as an exception.
fn raise(error: uzswap_region::Error) -> PyErr {
    Error::new_err(error.to_string())
}

/// A number of bytes, or a text such as "512M".
#[derive(FromPyObject)]
enum Size {
    Bytes(u64),
    Text(String),
}

impl From<Size> for MemorySize {
    fn from(size: Size) -> Self {
        match size {
            Size::Bytes(bytes) => bytes.into(),
            Size::Text(text) => text.into(),
        }
    }
}

/// A memory budget. `uzswap.Pager` adds the functions for NumPy.
#[pyclass(subclass, frozen, module = "uzswap")]
struct Pager(uzswap_region::Pager);

#[pymethods]
impl Pager {
    #[new]
    #[pyo3(signature = (
        memory, *, compressor=None, backing=None, mode=None, fork=None, reclaim_threads=None
    ))]
    fn new(
        py: Python<'_>,
        memory: Size,
        compressor: Option<&str>,
        backing: Option<&str>,
        mode: Option<&str>,
        fork: Option<&str>,
        reclaim_threads: Option<usize>,
    ) -> PyResult<Self> {
        let mut builder = uzswap_region::Pager::builder().memory(memory);
        if let Some(name) = compressor {
            builder = builder.compressor(name);
        }
        if let Some(backing) = backing {
            builder = builder.backing(backing);
        }
        if let Some(mode) = mode {
            builder = builder.mode(mode.parse().map_err(raise)?);
        }
        if let Some(fork) = fork {
            builder = builder.on_fork(fork.parse().map_err(raise)?);
        }
        if let Some(threads) = reclaim_threads {
            builder = builder.reclaim_threads(threads);
        }
        py.detach(|| builder.build()).map(Self).map_err(raise)
    }

    /// A region of at least this many bytes, all zeros. This does not need numpy.
    fn map(&self, py: Python<'_>, nbytes: usize) -> PyResult<Region> {
        let region = py.detach(|| self.0.map(nbytes)).map_err(raise)?;
        Ok(Region { region, nbytes })
    }

    /// The pager's figures, by the names of docs/statistics.md.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let statistics = py.detach(|| self.0.stats());
        let dict = PyDict::new(py);
        for (name, value) in statistics.iter() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// Changes the budget: bytes, or a text such as "512M".
    fn set_memory(&self, py: Python<'_>, memory: Size) -> PyResult<()> {
        py.detach(|| self.0.set_memory(memory)).map_err(raise)
    }

    /// The budget in bytes.
    #[getter]
    fn memory(&self) -> u64 {
        self.0.memory()
    }

    /// "in-thread" or "handler-threads".
    #[getter]
    fn mode(&self) -> String {
        self.0.mode().to_string()
    }

    fn _pin(&self, py: Python<'_>, address: usize, bytes: usize) -> PyResult<Pin> {
        let (region, range) = self.part(address, bytes)?;
        py.detach(|| region.pin(range)).map(|pinned| Pin(Some(pinned))).map_err(raise)
    }

    fn _touch(&self, py: Python<'_>, address: usize, bytes: usize) -> PyResult<()> {
        let (region, range) = self.part(address, bytes)?;
        py.detach(|| region.touch(range)).map_err(raise)
    }

    fn _advise(&self, py: Python<'_>, address: usize, bytes: usize, advice: &str) -> PyResult<()> {
        let advice = match advice {
            "normal" => Advice::Normal,
            "sequential" => Advice::Sequential,
            "random" => Advice::Random,
            "will-need" => Advice::WillNeed,
            "page-out" => Advice::PageOut,
            "dont-need" => Advice::DontNeed,
            other => {
                let names = "normal, sequential, random, will-need, page-out, dont-need";
                return Err(Error::new_err(format!("advice {other:?}: use one of {names}")));
            }
        };
        let (region, range) = self.part(address, bytes)?;
        py.detach(|| region.advise(range, advice)).map_err(raise)
    }
}

impl Pager {
    /// The region around a range of memory, and the range in it.
    fn part(&self, address: usize, bytes: usize) -> PyResult<(RegionRef, Range<usize>)> {
        let region = self.0.region_at(address).ok_or_else(|| {
            Error::new_err("the array is not in a region of this pager; make it with pager.empty")
        })?;
        let start = address - region.as_ptr().addr().get();
        Ok((region, start..start.saturating_add(bytes)))
    }
}

/// Memory of a pager. It stays mapped until the last array over it is gone.
#[pyclass(frozen, module = "uzswap")]
struct Region {
    region: uzswap_region::Region,
    nbytes: usize,
}

#[pymethods]
impl Region {
    /// The address of its first byte.
    #[getter]
    fn address(&self) -> usize {
        self.region.as_ptr().addr().get()
    }

    /// Its length, as it was requested.
    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
    }

    fn __len__(&self) -> usize {
        self.nbytes
    }

    /// NumPy's array interface, version 3: bytes, writable.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let dict = PyDict::new(py);
        dict.set_item("version", 3)?;
        dict.set_item("shape", (self.nbytes,))?;
        dict.set_item("typestr", "|u1")?;
        dict.set_item("data", (self.address(), false))?;
        Ok(dict)
    }
}

/// Keeps a range in memory until it is released.
#[pyclass]
struct Pin(Option<Pinned>);

#[pymethods]
impl Pin {
    fn release(&mut self) {
        self.0 = None;
    }
}

/// A handler that gives NumPy's arrays of at least `above` bytes regions.
#[pyfunction]
fn _numpy_handler<'py>(pager: &Bound<'py, Pager>, above: Size) -> PyResult<Bound<'py, PyAny>> {
    let above = MemorySize::from(above).bytes("above").map_err(raise)?;
    numpy::handler(pager.py(), pager.get().0.clone(), above as usize)
}

/// Installs a handler in the current context. Returns the former handler.
#[pyfunction]
fn _numpy_install<'py>(handler: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    numpy::install(handler)
}

/// Directs faults of regions to the pager again, after the program has set a handler of SIGBUS.
#[pyfunction]
fn _take_back() -> PyResult<()> {
    uzswap_region::signals::take_back().map_err(PyErr::from)
}

#[pymodule]
fn _uzswap(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("Error", module.py().get_type::<Error>())?;
    module.add_class::<Pager>()?;
    module.add_class::<Region>()?;
    module.add_function(wrap_pyfunction!(_take_back, module)?)?;
    module.add_function(wrap_pyfunction!(_numpy_handler, module)?)?;
    module.add_function(wrap_pyfunction!(_numpy_install, module)?)
}

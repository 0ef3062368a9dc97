"""Programs whose arrays `pager.allocator` puts in regions, `python -m uzswap`, and the examples."""

import hashlib
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import unittest

FOLDER = pathlib.Path(__file__).resolve().parent


def run(*arguments, **options):
    # One thread of BLAS, and one order of sets: the same result each time.
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", PYTHONHASHSEED="0")
    command = [sys.executable, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, **options)
    if ended.returncode:
        raise AssertionError(f"{command}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}")
    return ended


# Runs a program with its large arrays in regions. The arguments are those of Pager and of allocator, then the program
# with its own. The program is a file, or after "-m" a module. Prints the statistics to standard error.
ALLOCATED = """
import runpy, sys, uzswap
options, above, *sys.argv = sys.argv[1:]
pager = uzswap.Pager(**eval(options))
with pager.allocator(above):
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
for name, value in pager.stats().items():
    print(f"  {name} {value}", file=sys.stderr)
"""


def allocated(above, **options):
    """The arguments of Python that come before such a program."""
    return ["-c", ALLOCATED, repr(options), above]


def statistic(report, name):
    return int(re.search(rf"^  {name} (\d+)$", report, re.MULTILINE)[1])


class Programs(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory(dir="/var/tmp")
        self.addCleanup(holder.cleanup)
        self.folder = pathlib.Path(holder.name)

    @unittest.skipUnless("UZSWAP_FULL" in os.environ, "takes minutes; UZSWAP_FULL=1 runs it")
    def test_gensim_learns_the_same_vectors_in_a_quarter_of_their_memory(self):
        words = 0
        with open(self.folder / "corpus", "w") as corpus:
            for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[::2]:
                for line in path.read_text(errors="replace").splitlines():
                    found = re.findall(r"\w+", line)
                    words += len(found)
                    print(*found, file=corpus)
        self.assertGreater(words, 100_000)

        def learn(output, *before):
            run(*before, "-m", "gensim.scripts.word2vec_standalone", "-train", "corpus", "-output",
                output, "-size", 400, "-sample", 0, "-iter", 1, "-min_count", 1, "-threads", 1,
                "-binary", 1, cwd=self.folder)
            digest = hashlib.sha256((self.folder / output).read_bytes()).hexdigest()
            return digest, (self.folder / output).stat().st_size

        plain, size = learn("plain")
        # The program has two arrays of that size: the learned vectors, and the weights.
        memory = 2 * size // 4
        self.assertGreater(memory, 8 << 20)
        ours, _ = learn("ours", *allocated("1M", memory=memory, backing="pages:512M"))
        self.assertEqual(ours, plain)

    def test_arrays_grow_shrink_and_move_between_allocators(self):
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent("""
            import numpy
            for count in [10, 1000, 50_000, 2_000_000]:
                numbers = numpy.fromiter(range(count), "i8")
                assert (numbers == numpy.arange(count)).all()
                for size in [count * 3, 7, 300_000, 1]:
                    kept = min(size, numbers.size)
                    before = numbers[:kept].copy()
                    numbers.resize(size, refcheck=False)
                    assert (numbers[:kept] == before).all() and not numbers[kept:].any()
            text = numpy.array([str(i) for i in range(200_000)])
            assert (text.astype("i8") == numpy.arange(200_000)).all()
            objects = numpy.array([object() for _ in range(200_000)])
            assert len(set(objects)) == 200_000
        """))
        backing = f"{self.folder}/pages:256M"
        ended = run(*allocated("64K", memory="16M", backing=backing), script)
        self.assertGreater(statistic(ended.stderr, "faults"), 0)

    def test_a_fork_makes_arrays_of_its_own(self):
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent("""
            import multiprocessing, numpy, uzswap
            def total(count):
                return int(numpy.arange(count).sum() + numpy.zeros(count).sum())
            if __name__ == "__main__":
                with uzswap.Pager("32M").allocator():
                    kept = numpy.ones(1 << 20)
                    for method in ["fork", "spawn"]:
                        with multiprocessing.get_context(method).Pool(2) as pool:
                            assert pool.map(total, [1 << 20] * 8) == [total(1 << 20)] * 8
                    assert kept.sum() == 1 << 20
        """))
        run(script)

    def test_the_module_without_the_program_says_where_to_get_it(self):
        environment = dict(os.environ, PATH="/nonexistent")
        command = [sys.executable, "-m", "uzswap", "run", "--", "true"]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertEqual((ended.returncode, ended.stdout), (1, ""))
        self.assertEqual(len(ended.stderr.splitlines()), 1, ended.stderr)
        self.assertIn("without the program", ended.stderr)

    def test_the_examples_run(self):
        examples = sorted((FOLDER.parent / "examples").glob("*.py"))
        self.assertTrue(examples)
        for example in examples:
            self.assertTrue(run(example).stdout.endswith("done\n"), example)


if __name__ == "__main__":
    unittest.main()

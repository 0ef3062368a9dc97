"""Programs that know nothing of regions, under `python -m uzswap`, and the examples."""

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
        # Two arrays of that size: what is learned, and the weights that it is learned with.
        memory = 2 * size // 4
        self.assertGreater(memory, 8 << 20)
        ours, _ = learn("ours", "-m", "uzswap", "--memory", memory, "--backing", "pages:512M")
        self.assertEqual(ours, plain)

    def test_arguments_names_and_threads_are_as_without(self):
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent("""
            import sys, threading, numpy
            def where():
                array = numpy.ones(1 << 20)
                handler = getattr(numpy, "_core", None) or numpy.core
                names.append(handler.multiarray.get_handler_name(array))
            names = []
            thread = threading.Thread(target=where)
            thread.start()
            thread.join()
            where()
            print(__name__, sys.argv[1:], names, sys.path[0])
            sys.exit(3)
        """))
        command = [sys.executable, "-m", "uzswap", "--memory", "64M", script, "a", "-q", "--memory"]
        ended = subprocess.run(command, capture_output=True, text=True)
        expected = f"__main__ ['a', '-q', '--memory'] ['uzswap', 'uzswap'] {self.folder}\n"
        self.assertEqual((ended.returncode, ended.stdout), (3, expected), ended.stderr)
        self.assertGreater(statistic(ended.stderr, "faults"), 0)

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
        options = ["--memory", "16M", "--above", "64K", "--backing", backing]
        ended = run("-m", "uzswap", *options, script)
        self.assertGreater(statistic(ended.stderr, "faults"), 0)

    def test_a_fork_makes_arrays_of_its_own(self):
        script = self.folder / "script.py"
        script.write_text(textwrap.dedent("""
            import multiprocessing, numpy
            def total(count):
                return int(numpy.arange(count).sum() + numpy.zeros(count).sum())
            if __name__ == "__main__":
                kept = numpy.ones(1 << 20)
                for method in ["fork", "spawn"]:
                    with multiprocessing.get_context(method).Pool(2) as pool:
                        assert pool.map(total, [1 << 20] * 8) == [total(1 << 20)] * 8
                assert kept.sum() == 1 << 20
        """))
        run("-m", "uzswap", "--memory", "32M", script)

    def test_wrong_options_are_one_line(self):
        for wrong, said in [
            (["--memory", "much"], "much"),
            (["--memory", "64M", "--compressor", "squash"], "squash"),
            (["--memory", "64M", "--above", "-3"], "-3"),
        ]:
            command = [sys.executable, "-m", "uzswap", *wrong, "script.py"]
            ended = subprocess.run(command, capture_output=True, text=True)
            self.assertNotEqual(ended.returncode, 0)
            self.assertIn(said, ended.stderr.splitlines()[-1])
            self.assertNotIn("Traceback", ended.stderr)

    def test_the_examples_run(self):
        examples = sorted((FOLDER.parent / "examples").glob("*.py"))
        self.assertTrue(examples)
        for example in examples:
            self.assertTrue(run(example).stdout.endswith("done\n"), example)


if __name__ == "__main__":
    unittest.main()

"""Arrays in regions: numpy's results are numpy's, and memory that was given away comes back."""

import gc
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import unittest

import numpy

import uzswap

MODES = ["in-thread", "handler-threads"]
MIB = 1 << 20


def pagers(memory="16M", **options):
    """A pager in each mode that this process may use, with a backing: numbers compress badly."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        for mode in MODES:
            backing = f"{folder}/{mode}:256M"
            try:
                yield uzswap.Pager(memory, mode=mode, backing=backing, **options)
            except uzswap.Error as error:
                if mode == "in-thread" or os.environ.get("CI"):
                    raise
                print(f"skipped: {error}")


def walk(count, seed=7):
    """Floats like those of real programs: a rounded random walk."""
    return numpy.random.default_rng(seed).normal(size=count).round(2).cumsum().round(2)


class Signals(unittest.TestCase):
    SCRIPT = """
        import faulthandler, mmap, signal, sys, tempfile
        import numpy, uzswap
        pager = uzswap.Pager("8M", mode="in-thread")
        array = pager.empty(4 << 20, "i8")
        array[:] = numpy.arange(4 << 20) // 7
        {set}
        assert (array == numpy.arange(4 << 20) // 7).all()
        with tempfile.TemporaryFile() as file:
            file.truncate(4096)
            beyond = mmap.mmap(file.fileno(), 4096)
            file.truncate(0)
            print("so far", flush=True)
            beyond[0]
    """

    def end(self, set):
        script = textwrap.dedent(self.SCRIPT).format(set=set)
        ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        self.assertEqual(ended.stdout, "so far\n", ended.stderr)
        self.assertEqual(ended.returncode, -signal.SIGBUS, ended.stderr)
        return ended.stderr

    def test_a_faulthandler_that_comes_later_gets_faults_outside_of_regions(self):
        said = self.end("faulthandler.enable()")
        self.assertEqual(said.count("Bus error"), 1, said)
        said = self.end("faulthandler.enable(); faulthandler.disable(); faulthandler.enable()")
        self.assertEqual(said.count("Bus error"), 1, said)

    def test_a_handler_that_is_taken_off_later_leaves_regions_alone(self):
        self.assertEqual(self.end("signal.signal(signal.SIGBUS, signal.SIG_DFL)"), "")


class Arrays(unittest.TestCase):
    def test_an_array_four_times_the_memory_keeps_its_values(self):
        expected = walk(4 * MIB)
        for pager in pagers("8M"):
            with self.subTest(pager.mode):
                array = pager.empty(expected.shape, expected.dtype)
                self.assertIs(type(array), numpy.ndarray)
                array[:] = expected
                self.assertGreater(pager.stats()["stored_pages"], 0)
                self.assertTrue((array == expected).all())
                array += 1
                self.assertEqual(array.sum(), (expected + 1).sum())
                part = array[: 2 * MIB]
                part.sort()
                self.assertTrue((part == numpy.sort(expected[: 2 * MIB] + 1)).all())

    def test_shapes_types_and_orders_are_numpys(self):
        pager = uzswap.Pager("16M")
        for shape in [5, (), (0,), (3, 0, 2), (300, 7), [2, 3, 4], numpy.int64(9)]:
            for dtype in ["f4", "u1", "complex128", [("a", "i2"), ("b", "f8")], "M8[s]", "S7"]:
                for order in "CF":
                    ours = pager.zeros(shape, dtype, order)
                    theirs = numpy.zeros(shape, dtype, order)
                    self.assertEqual(ours.shape, theirs.shape)
                    self.assertEqual(ours.dtype, theirs.dtype)
                    self.assertEqual(ours.strides, theirs.strides)
                    self.assertTrue((ours == theirs).all())
                    self.assertTrue(ours.flags.writeable)
        copy = pager.array([[1, 2], [3, 4]])
        self.assertEqual(copy.tolist(), [[1, 2], [3, 4]])

    def test_objects_and_wrong_shapes_are_refused(self):
        pager = uzswap.Pager("16M")
        with self.assertRaisesRegex(TypeError, "numpy.empty"):
            pager.empty(4, object)
        with self.assertRaises(ValueError):
            pager.empty((4, -1))
        with self.assertRaises(uzswap.Error):
            pager.empty(1 << 62, "u1")

    def test_an_array_keeps_its_region_and_its_pager(self):
        array = uzswap.Pager("16M").zeros(MIB)[::2]
        gc.collect()
        array[:] = 5
        self.assertEqual(array.sum(), 5 * array.size)
        view = array.reshape(2, -1)
        del array
        gc.collect()
        self.assertEqual(view[1, 7], 5)

    def test_a_region_goes_with_its_last_array(self):
        pager = uzswap.Pager("16M")
        for _ in range(2000):
            pager.zeros(MIB)[0] = 1
        def mapped():
            with open("/proc/self/maps") as maps:
                return len(maps.readlines())
        before = mapped()
        arrays = [pager.zeros(MIB) for _ in range(50)]
        self.assertGreater(mapped(), before)
        del arrays
        gc.collect()
        self.assertLessEqual(mapped(), before + 2)

    def test_a_buffer_needs_no_numpy(self):
        program = """
            import sys, uzswap
            pager = uzswap.Pager("8M")
            view = pager.buffer(32 << 20)
            for start in range(0, len(view), 4096):
                view[start : start + 4] = start.to_bytes(4, "little")
            for start in range(0, len(view), 4096):
                assert int.from_bytes(view[start : start + 4], "little") == start
            assert pager.stats()["stored_pages"] > 0 and "numpy" not in sys.modules
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)

    def test_options_are_checked(self):
        for wrong in [
            dict(memory="much"),
            dict(memory=0),
            dict(memory="16M", compressor="squash"),
            dict(memory="16M", mode="fast"),
            dict(memory="16M", fork="maybe"),
            dict(memory="16M", reclaim_threads=0),
            dict(memory="16M", backing="/no/such/folder/pages:8M"),
        ]:
            with self.assertRaises(uzswap.Error, msg=wrong) as caught:
                uzswap.Pager(**wrong)
            self.assertEqual(len(str(caught.exception).splitlines()), 1)

    def test_the_memory_can_be_changed(self):
        for pager in pagers():
            with self.subTest(pager.mode):
                array = pager.zeros(4 * MIB)
                array[:] = numpy.arange(4 * MIB)
                self.assertEqual(pager.memory, 16 * MIB)
                pager.set_memory("64M")
                self.assertEqual(pager.memory, 64 * MIB)
                with self.assertRaises(uzswap.Error):
                    pager.set_memory(1)
                self.assertEqual(pager.memory, 64 * MIB)
                pager.set_memory(48 * MIB)
                self.assertTrue((array == numpy.arange(4 * MIB)).all())

    def test_advice_changes_no_byte_but_dont_need(self):
        for pager in pagers():
            with self.subTest(pager.mode):
                array = pager.zeros((1024, 512))
                expected = walk(array.size).reshape(array.shape)
                array[:] = expected
                for advice in ["normal", "sequential", "random", "will-need", "page-out"]:
                    pager.advise(array, advice)
                    pager.advise(array[10:20, ::3], advice)
                    self.assertTrue((array == expected).all(), advice)
                pager.advise(array, "page-out")
                self.assertGreater(pager.stats()["stored_pages"], 0)
                pager.touch(array[::-1])
                pager.advise(array[512:], "dont-need")
                self.assertTrue((array[:512] == expected[:512]).all())
                self.assertFalse(array[512:].any())
                with self.assertRaisesRegex(uzswap.Error, "use one of"):
                    pager.advise(array, "hurry")
                with self.assertRaises(uzswap.Error):
                    pager.touch(numpy.zeros(9))

    def test_pinned_memory_may_be_given_to_the_kernel(self):
        for pager in pagers():
            with self.subTest(pager.mode), tempfile.TemporaryFile(buffering=0) as file:
                array = pager.zeros(MIB // 4)
                array[:] = expected = walk(MIB // 4)
                pager.advise(array, "page-out")
                with pager.pin(array) as pinned:
                    self.assertIs(pinned, array)
                    self.assertEqual(file.write(array), array.nbytes)
                    array[:] = 0
                    file.seek(0)
                    self.assertEqual(file.readinto(array), array.nbytes)
                self.assertTrue((array == expected).all())
                with self.assertRaises(uzswap.Error):
                    with pager.pin(pager.zeros(4 * MIB)):
                        pass

    def test_threads_share_an_array(self):
        for pager in pagers():
            with self.subTest(pager.mode):
                array = pager.zeros((8, MIB))

                def work(row):
                    for _ in range(3):
                        array[row] += numpy.arange(MIB)

                threads = [threading.Thread(target=work, args=(row,)) for row in range(8)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                self.assertTrue((array == 3 * numpy.arange(MIB)).all())


class Files(unittest.TestCase):
    def test_files_come_in_and_out_in_any_mode(self):
        expected = walk(8 * MIB + 77)
        for pager in pagers():
            with self.subTest(pager.mode), tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "numbers")
                array = pager.array(expected)
                pager.advise(array, "page-out")
                uzswap.tofile(array, path)
                self.assertEqual(os.path.getsize(path), expected.nbytes)
                back = uzswap.fromfile(path, pager=pager)
                self.assertTrue((back == expected).all())
                with open(path, "rb") as file:
                    file.seek(80)
                    part = uzswap.fromfile(file, "f8", 1000, pager=pager)
                    self.assertTrue((part == expected[10:1010]).all())
                    self.assertEqual(file.tell(), 80 + 8000)
                    rest = uzswap.fromfile(file, "f8", expected.size, pager=pager)
                    self.assertTrue((rest == expected[1010:]).all())
                with open(path, "rb", buffering=0) as file:
                    self.assertEqual(uzswap.readinto(file, array[:5000]), 40_000)
                self.assertTrue((array == expected).all())

    def test_plain_file_io_works_with_handler_threads(self):
        for pager in pagers():
            if pager.mode == "handler-threads":
                with tempfile.TemporaryDirectory() as folder:
                    path = os.path.join(folder, "numbers")
                    array = pager.array(walk(8 * MIB))
                    array.tofile(path)
                    array[:] = 0
                    with open(path, "rb", buffering=0) as file:
                        file.readinto(array)
                    self.assertTrue((array == walk(8 * MIB)).all())

    def test_an_array_that_is_not_contiguous_is_refused(self):
        pager = uzswap.Pager("16M")
        with self.assertRaisesRegex(ValueError, "contiguous"):
            uzswap.tofile(pager.zeros((50, 50))[:, 3], os.devnull)


class Forks(unittest.TestCase):
    def run_program(self, program):
        program = "import os, signal, uzswap\n" + textwrap.dedent(program)
        run = [sys.executable, "-c", program]
        return subprocess.run(run, capture_output=True, text=True, timeout=600)

    def test_a_child_that_touches_an_array_dies_with_a_message(self):
        ended = self.run_program("""
            array = uzswap.Pager("16M").zeros(1 << 20)
            array[:] = 5
            child = os.fork()
            if child == 0:
                print(array.sum())
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGSEGV, status
            assert array.sum() == 5 << 20
        """)
        self.assertEqual((ended.returncode, ended.stdout), (0, ""), ended.stderr)
        self.assertIn("fork", ended.stderr)

    def test_multiprocessing_may_fork_if_children_have_copies(self):
        ended = self.run_program("""
            import multiprocessing
            import numpy

            def work(part):
                mine = whole[part::4]
                mine += 1
                return mine.sum(), (mine == expected[part::4] + 1).all()

            expected = numpy.arange(4 << 20) // 7
            context = multiprocessing.get_context("fork")
            for mode in ["in-thread", "handler-threads"]:
                try:
                    pager = uzswap.Pager("8M", mode=mode, fork="copy")
                except uzswap.Error:
                    if mode == "in-thread" or os.environ.get("CI"):
                        raise
                    continue
                whole = pager.array(expected)
                assert pager.stats()["stored_pages"] > 1000
                with context.Pool(4) as pool:
                    for part, (total, same) in enumerate(pool.map(work, range(4), chunksize=1)):
                        assert same and total == (expected[part::4] + 1).sum(), part
                whole += 3
                assert (whole == expected + 3).all()
        """)
        self.assertEqual(ended.returncode, 0, ended.stderr)

    def test_a_child_that_touches_none_ends_as_ever(self):
        ended = self.run_program("""
            import sys
            pager = uzswap.Pager("16M")
            array = pager.zeros(1 << 20)
            array[:] = 5
            if os.fork() == 0:
                del array, pager
                sys.exit(7)
            _, status = os.wait()
            assert os.waitstatus_to_exitcode(status) == 7, status
            assert array.sum() == 5 << 20
        """)
        self.assertEqual(ended.returncode, 0, ended.stderr)


if __name__ == "__main__":
    unittest.main()

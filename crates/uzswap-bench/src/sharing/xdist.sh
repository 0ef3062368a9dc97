# Tests on four workers, each of which imports libraries and loads the same data.
cat > test_data.py <<'P'
import json, sqlite3, time, unittest
import numpy, pandas, pytest

@pytest.fixture(scope="session")
def rows():
    return [{"id": i, "name": "customer %d" % i, "city": "city %d" % (i % 300)} for i in range(100000)]

@pytest.mark.parametrize("part", range(12))
def test_part(rows, part):
    frame = pandas.DataFrame(rows[part::12])
    base = sqlite3.connect(":memory:")
    frame.to_sql("rows", base)
    assert base.execute("select count(*) from rows").fetchone()[0] == len(frame)
    time.sleep(0.5)
P
exec /usr/bin/python3 -m pytest -q -p no:cacheprovider -n 4 test_data.py

# Eight compilers at the same time: C, and C++ with templates of the standard library.
set -eu
rm -rf build
mkdir build
cd build
for number in 1 2 3 4 5 6; do
    cp "../part$((number - 1)).c" "c$number.c"
    cat >"cc$number.cc" <<END
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>
template <int N> struct Step {
    std::map<std::string, std::vector<int>> known;
    std::unordered_map<int, std::function<int(int)>> calls;
    int add(const std::string &name, int value) {
        auto &list = known[name + std::to_string(N)];
        list.push_back(value + $number);
        std::sort(list.begin(), list.end());
        calls[value] = [=, this](int more) { return more * N + (int)known.size(); };
        return calls[value](value) + Step<N - 1>().add(name, value - 1);
    }
};
template <> struct Step<0> { int add(const std::string &, int value) { return value; } };
int all$number(int value) { return Step<12>().add("step", value); }
END
done
cat >makefile <<'END'
all: $(patsubst %.c,%.o,$(wildcard *.c)) $(patsubst %.cc,%.o,$(wildcard *.cc))
%.o: %.c
	gcc -O1 -c $< -o $@
%.o: %.cc
	g++ -std=c++20 -O1 -c $< -o $@
END
make --silent --jobs=8
cat *.o | md5sum

# Eight C++ compilers at the same time.
for i in 1 2 3 4 5 6 7 8; do
    cat > part$i.cc <<P
#include <algorithm>
#include <iostream>
#include <map>
#include <regex>
#include <string>
#include <vector>
int part$i(const std::string &text) {
    std::regex words("[a-z]+$i");
    std::map<std::string, std::vector<int>> found;
    for (std::sregex_iterator it(text.begin(), text.end(), words), end; it != end; ++it)
        found[it->str()].push_back(it->position());
    std::cout << found.size() << std::endl;
    return found.size() * $i;
}
P
done
printf 'all: part1.o part2.o part3.o part4.o part5.o part6.o part7.o part8.o\n%%.o: %%.cc\n\tg++ -O1 -c $< -o $@\n' > makefile
rm -f part*.o
exec make -s -j8

# Collects a heap, with one thread and with several.
set -eu
mkdir -p classes
[ -e classes/Heap.class ] || javac -d classes Heap.java
for collector in UseSerialGC UseG1GC; do
    java -XX:+$collector -Xms16m -Xmx96m -XX:-UsePerfData -cp classes Heap
done

# A heap that is collected, by one thread and by several.
set -eu
mkdir -p classes
[ -e classes/Heap.class ] || javac -d classes Heap.java
for collector in UseSerialGC UseG1GC; do
    java -XX:+$collector -Xms16m -Xmx96m -XX:-UsePerfData -cp classes Heap
done

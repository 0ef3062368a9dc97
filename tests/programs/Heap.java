/** Objects of several sizes, most of which are dropped soon, and a table of those that stay. */
public class Heap {
    static final class Node {
        final byte[] text;
        final Node next;
        final int length;
        Node(long key, Node next) {
            this.next = next;
            length = next == null ? 1 : next.length + 1;
            text = new byte[(int) (key % 601) + 20];
            for (int at = 0; at < text.length; at++) text[at] = (byte) (key >> at % 8 * 4);
        }
    }

    public static void main(String[] words) {
        Node[] table = new Node[1 << 13];
        long state = 1, sum = 0;
        for (int turn = 0; turn < 200_000; turn++) {
            state = state * 6364136223846793005L + 1442695040888963407L;
            int at = (int) (state >>> 51);
            Node node = new Node(state >>> 33, table[at]);
            if (node.length > 24) {
                for (Node one = node; one != null; one = one.next)
                    for (byte each : one.text) sum = sum * 31 + each;
                node = null;
            }
            table[at] = node;
            for (int more = 0; more < 8; more++) sum += new Node(turn + more, null).text[more];
        }
        System.out.println(sum);
    }
}

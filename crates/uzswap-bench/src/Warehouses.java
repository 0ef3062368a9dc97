// A company of warehouses, in the manner of TPC-C: two threads make orders, payments, deliveries
// and questions. The heap grows by warehouses. Prints, for each number of warehouses, the
// transactions a second and the 99th percentile of their time.
//
//     java Warehouses.java SECONDS WAREHOUSES...

import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import java.util.concurrent.atomic.AtomicLong;

public class Warehouses {
    static final int ITEMS = 10_000, CUSTOMERS = 3_000, ORDERS = 3_000, THREADS = 2;

    static final class Stock {
        final String name, data;
        final int price;
        int quantity = 100, sold;
        Stock(int id, SplittableRandom random) {
            name = "item " + id;
            data = Long.toHexString(random.nextLong()) + " in shelf " + id % 97;
            price = 100 + random.nextInt(9_900);
        }
    }

    static final class Customer {
        final String name;
        long balance;
        final ArrayDeque<String> payments = new ArrayDeque<>();
        Customer(int id) { name = "customer " + id; }
    }

    record Line(Stock stock, int count) {}

    static final class Order {
        final Customer customer;
        final List<Line> lines = new ArrayList<>();
        boolean isDelivered;
        Order(Customer customer) { this.customer = customer; }
        long sum() {
            long sum = 0;
            for (Line line : lines) sum += (long) line.stock().price * line.count();
            return sum;
        }
    }

    static final class Warehouse {
        final Stock[] stock = new Stock[ITEMS];
        final Customer[] customers = new Customer[CUSTOMERS];
        final ArrayDeque<Order> orders = new ArrayDeque<>();
        Warehouse(int number) {
            SplittableRandom random = new SplittableRandom(number);
            for (int id = 0; id < ITEMS; id++) stock[id] = new Stock(id, random);
            for (int id = 0; id < CUSTOMERS; id++) customers[id] = new Customer(id);
            for (int at = 0; at < ORDERS; at++) order(random);
        }
        synchronized long order(SplittableRandom random) {
            Order order = new Order(customers[random.nextInt(CUSTOMERS)]);
            for (int at = 5 + random.nextInt(11); at > 0; at--) {
                Stock from = stock[random.nextInt(ITEMS)];
                int count = 1 + random.nextInt(10);
                from.quantity += from.quantity < count + 10 ? 91 - count : -count;
                from.sold += count;
                order.lines.add(new Line(from, count));
            }
            orders.addLast(order);
            if (orders.size() > ORDERS) orders.removeFirst();
            return order.sum();
        }
        synchronized long pay(SplittableRandom random) {
            Customer customer = customers[random.nextInt(CUSTOMERS)];
            int amount = 1 + random.nextInt(5_000);
            customer.balance -= amount;
            customer.payments.addLast(customer.name + " paid " + amount);
            if (customer.payments.size() > 8) customer.payments.removeFirst();
            return amount;
        }
        synchronized long deliver() {
            int left = 10;
            long sum = 0;
            for (Order order : orders) {
                if (order.isDelivered) continue;
                order.isDelivered = true;
                order.customer.balance += order.sum();
                sum += order.lines.size();
                if (--left == 0) break;
            }
            return sum;
        }
        synchronized long lowStock() {
            int seen = 20;
            long low = 0;
            for (var newest = orders.descendingIterator(); newest.hasNext() && seen > 0; seen--)
                for (Line line : newest.next().lines) if (line.stock().quantity < 15) low++;
            return low;
        }
    }

    static long transact(Warehouse warehouse, SplittableRandom random) {
        int kind = random.nextInt(100);
        if (kind < 45) return warehouse.order(random);
        if (kind < 88) return warehouse.pay(random);
        return kind < 94 ? warehouse.deliver() : warehouse.lowStock();
    }

    public static void main(String[] words) throws InterruptedException {
        double seconds = Double.parseDouble(words[0]);
        List<Warehouse> all = new ArrayList<>();
        List<String> said = new ArrayList<>();
        AtomicLong total = new AtomicLong();
        for (int step = 1; step < words.length; step++) {
            while (all.size() < Integer.parseInt(words[step])) all.add(new Warehouse(all.size()));
            long end = System.nanoTime() + (long) (seconds * 1e9);
            long[][] took = new long[THREADS][];
            Thread[] threads = new Thread[THREADS];
            for (int own = 0; own < THREADS; own++) {
                int number = own;
                SplittableRandom random = new SplittableRandom(1_000L * step + own);
                threads[own] = new Thread(() -> {
                    long[] nanos = new long[1 << 12];
                    int count = 0;
                    for (long before = System.nanoTime(); before < end; ) {
                        total.addAndGet(transact(all.get(random.nextInt(all.size())), random));
                        long after = System.nanoTime();
                        if (count == nanos.length) nanos = Arrays.copyOf(nanos, count * 2);
                        nanos[count++] = after - before;
                        before = after;
                    }
                    took[number] = Arrays.copyOf(nanos, count);
                });
                threads[own].start();
            }
            for (Thread thread : threads) thread.join();
            long[] nanos = Arrays.stream(took).flatMapToLong(Arrays::stream).sorted().toArray();
            said.add(String.format("{\"warehouses\":%d,\"rate\":%.1f,\"p99_ms\":%.3f}", all.size(),
                nanos.length / seconds, nanos[(int) (nanos.length * 0.99)] / 1e6));
        }
        System.err.println("moved " + total.get());
        System.out.println("[" + String.join(",", said) + "]");
    }
}

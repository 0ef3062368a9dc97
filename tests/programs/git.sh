# Makes a repository of 24 commits to files of 1 MB, packs it twice, and checks it.
set -eu
rm -rf repository
export GIT_CONFIG_NOSYSTEM=1 GIT_AUTHOR_NAME=test GIT_AUTHOR_EMAIL=test@example.org
export GIT_COMMITTER_NAME=test GIT_COMMITTER_EMAIL=test@example.org
git init --quiet repository
cd repository
git config gc.auto 0
git config pack.threads 2
for commit in $(seq 24); do
    for file in 1 2 3 4; do
        tail -n +$((commit * 700 + file * 90000)) ../numbers | head -n 60000 >numbers$file
        sed "s/int a/int argument_$commit/" ../part$file.c >part$file.c
    done
    git add .
    export GIT_AUTHOR_DATE="$((1700000000 + commit)) +0000"
    export GIT_COMMITTER_DATE="$GIT_AUTHOR_DATE"
    git commit --quiet --message "The $commit. commit"
done
git repack -a -d -f --quiet
git fsck --full --strict 2>&1
git repack -a -d --quiet --depth=1 -F
git fsck --full 2>&1
git rev-parse HEAD
git cat-file --batch-all-objects --batch='%(objectname) %(objectsize)' --buffer | md5sum

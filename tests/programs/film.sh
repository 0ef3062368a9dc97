# Encodes a film of three seconds with two threads, and decodes it.
set -eu
ffmpeg() { command ffmpeg -nostdin -hide_banner -loglevel error -y "$@"; }
ffmpeg -f lavfi -i testsrc2=size=960x540:rate=25:duration=3 \
    -f lavfi -i sine=frequency=440:duration=3 -threads 2 -c:v libx264 -c:a aac film.mp4
md5sum <film.mp4
ffmpeg -threads 2 -i film.mp4 -f framemd5 - | md5sum

module github.com/perdure-dev/perdure/bench/peers/drive

go 1.26
